"""Implements `kvloft serve`, which shares a cache among all of this user's engines on this machine.

This module reads settings, waits for signals and prints the log. The server itself is in Rust.
"""

import argparse
import contextlib
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from kvloft.cli import metrics, warn
from kvloft.cli.admin import NONE, limits_text
from kvloft.cli.connection import COMMAND_LINE, add_socket, available_bytes, settings
from kvloft.cli.daemon import Log, in_background
from kvloft.config.sources import describe
from kvloft.config.table import KEYS, OF_STORE, Config
from kvloft.config.units import HintError, parse_seconds, size_text
from kvloft.errors import ConfigError, ShortageError, StoreError
from kvloft.limits import tenant_limits
from kvloft.machine import refuse_here, refuse_nodes, warnings
from kvloft.version import BUILD

LOOK_EVERY_S: Final = 0.5
FIRST_ENGINE_S: Final = 60.0
"""Time added to --linger until the first engine connects, because the engine may still be loading
weights.
"""
CLOSE_TIMEOUT_S: Final = 60.0
TWICE_S: Final = 1.0
"""Signals that arrive within this time after the first signal are ignored."""
ENDS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that stop the server once its writes are complete. Closing a terminal sends SIGHUP."""
OPTIONS: Final = {
    "host_size": "host memory for cached KV, allocated on first use",
    "disk_path": "directory of the disk tier; without a disk tier, a restart empties the cache",
    "disk_size": "size limit of the disk tier",
    "disk_threads": "number of threads for disk I/O",
    "eviction": "eviction policy: adaptive or lru",
    "salt_quota": "host memory limit per cache_salt in each namespace, such as 10%% or 8GiB",
    "salt_disk_quota": "disk space limit per cache_salt in each namespace",
    "salt_ttl": "time after which a cache_salt's chunks expire, such as 24h or 7d",
    "salt_limits": "YAML file with limits for individual salts",
}
DESCRIPTION: Final = """\
Share one cache among all of this user's engines on this machine. Engines
connect through a Unix socket that only this user can open. KV never passes
through the socket, because engines map the server's memory. Settings not given
as arguments come from environment variables such as KVLOFT_HOST_SIZE, the YAML
file in KVLOFT_CONFIG, or the defaults that `kvloft config` prints.
"""
EPILOG: Final = """\
With "server": "auto", the first engine starts a server with the engine's
settings. The socket is in $XDG_RUNTIME_DIR/kvloft or /tmp/kvloft-UID. This
server exits 5 minutes after the last engine exits (server_linger).

To share the cache, give each engine this setting, in
kv_connector_extra_config or as KVLOFT_SERVER:

  "server": "unix:/run/user/1000/kvloft/kvloft.sock"

Engines with the same model and vLLM version form a namespace and share KV. Each
namespace has separate chunks and a separate disk directory. Memory is assigned
to namespaces on demand. Once memory is full, all namespaces with engines get
equal shares, or the shares set with --share. A restarted engine finds its
chunks in the server's memory, unless another namespace needed the space. While
no server responds, engines run without the cache and reconnect in the
background.

A tenant is the set of requests with the same cache_salt. With --salt-quota, a
tenant at its limit evicts only its own least recently used chunks. With
--salt-ttl, chunks expire in memory and on disk. --salt-limits FILE sets limits
for individual salts:

  - {salt_file: acme.salt, quota: 25%, disk_quota: 40%, ttl: 7d}
  - {salt: null, ttl: 30d}    # requests without a salt

On SIGTERM, Ctrl-C or SIGHUP, a server with a disk tier writes pending chunks to
disk and exits. A server without a disk tier exits immediately.

`kvloft status --socket PATH` shows the state of a running server.
"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "serve",
        help="share one cache among engines and across restarts",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_socket(parser)
    for name, text in OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", help=text)
    parser.add_argument(
        "--linger",
        metavar="TIME",
        help=(
            "exit once no engine has been connected for TIME, such as 30s or 5min; the first "
            "engine gets an extra minute to connect"
        ),
    )
    parser.add_argument(
        "--background",
        metavar="LOG",
        help="run in the background and log to this file; return when the server is listening",
    )
    parser.add_argument(
        "--share",
        action="append",
        default=[],
        metavar="NAMESPACE=PERCENT",
        help=(
            "give the namespace whose id starts with NAMESPACE a fixed share of host memory; "
            "repeatable"
        ),
    )
    parser.add_argument(
        "--numa",
        metavar="NODES",
        help="NUMA node of each rank's GPU, such as 0,0,1,1, or one node for all host memory",
    )
    parser.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        help="export Prometheus metrics; without HOST, listen on 127.0.0.1",
    )
    parser.set_defaults(run=run)


def shares(texts: list[str]) -> list[tuple[str, int]]:
    """Parse ``NAMESPACE=PERCENT`` arguments. Raises ConfigError."""
    found = []
    for text in texts:
        match = re.fullmatch(r"([0-9a-f]{1,64})=([0-9]{1,3})%?", text.lower())
        if match is None:
            raise ConfigError(f"--share {text!r}: expected NAMESPACE=PERCENT, such as 3f9a=25.")
        found.append((match[1], int(match[2])))
    return found


def nodes(text: str | None) -> list[int]:
    """Parse a list of NUMA nodes, such as ``0,0,1,1``. Raises ConfigError if a node is invalid or
    unknown.
    """
    if text is None:
        return []
    if re.fullmatch(r"[0-9]{1,2}(,[0-9]{1,2})*", text) is None:
        raise ConfigError(
            f"--numa {text!r}: expected one node for each rank of an engine, such as 0,0,1,1, or "
            "one node for all ranks."
        )
    found = [int(each) for each in text.split(",")]
    refuse_nodes(found)
    return found


def run(args: argparse.Namespace) -> int:
    """Run the server until a signal arrives or ``--linger`` expires with no engine connected.

    Return 0 on success, or 1 if another server uses the socket, too little memory is free or a
    system call fails. Raises ConfigError if a setting is invalid.
    """
    config = settings(args)
    metrics_at = metrics.address(args.metrics) if args.metrics is not None else None
    own_shares, linger_s = shares(args.share), _linger(args.linger)
    options = _Options(config, own_shares, nodes(args.numa), metrics_at, linger_s)
    own = replace(config, server=None)  # the server uses this machine's memory and disk
    try:
        refuse_here(own, available_bytes())
    except ShortageError as e:  # temporary if engines still hold a killed server's memory
        warn(str(e))
        return 1
    _raise_file_limit()
    for warning in warnings(own, opens_disk=True):
        warn(f"warning: {warning}")
    serve = partial(_serve, options)
    _make_folder(config)
    if args.background is None:
        return serve(lambda: None)
    return in_background(
        serve,
        Path(args.background).absolute(),
        f"is listening in the background on unix:{config.socket}",
    )


def _raise_file_limit() -> None:
    """Raise the soft limit on open files to the hard limit. Connections and disk files count toward
    the soft limit, which is often only 1024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _make_folder(config: Config) -> None:
    """Create the socket's directory with access restricted to this user.

    Raises ConfigError if the parent directory is missing: the path probably has a typo, or its file
    system is not mounted yet. The server reports problems with an existing directory.
    """
    folder = Path(str(config.socket)).parent
    try:
        folder.mkdir(mode=0o700)
    except FileNotFoundError:
        raise ConfigError(
            f"{_given(config)}: {folder.parent} does not exist; create it, or use another path."
        ) from None
    except OSError:
        return
    warn(f"created {folder} for the socket, accessible only to this user")


def _given(config: Config) -> str:
    """Return the socket setting as the user wrote it."""
    origin = config.origin("server")
    if origin == COMMAND_LINE:
        return f"--socket {config.socket}"
    return f"server = unix:{config.socket} ({origin})"


def _linger(text: str | None) -> float | None:
    try:
        return parse_seconds(text) if text is not None else None
    except HintError as e:
        raise ConfigError(f"--linger {text!r} {e}") from None
    except (ValueError, ArithmeticError):
        raise ConfigError(
            f"--linger {text!r}: expected a duration of at most 1 hour, such as 300, 30s or 5min."
        ) from None


@dataclass(frozen=True, slots=True)
class _Options:
    """Validated arguments and settings."""

    config: Config
    shares: list[tuple[str, int]]
    numa: list[int]
    metrics_at: tuple[str, int] | None
    linger_s: float | None


def _serve(options: _Options, begun: Callable[[], None]) -> int:
    is_over, begun_s, log = threading.Event(), list[float](), Log()
    for number in ENDS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # set by nohup
            signal.signal(number, lambda number, _frame: _stop(is_over, begun_s, number))
    try:
        server = _start(options)
    except StoreError as e:
        warn(str(e))
        return 1
    end_metrics = None
    if options.metrics_at is not None:
        try:
            url, end_metrics = metrics.serve(options.metrics_at, server.status)
        except ConfigError:
            server.close(0.0)
            raise
    _log_start(options, server, log, begun)
    if end_metrics is not None:
        log.tell(f"metrics at {url}")
    _wait(is_over, server, options.linger_s, log)
    log.tell(_stop_line(options.config))
    server.close(CLOSE_TIMEOUT_S)
    if end_metrics is not None:
        end_metrics()
    log.tell(*server.take_events(), "stopped")
    log.end()
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)  # a late signal would kill the interpreter at exit
    return 0


def _start(options: _Options) -> Any:
    """Start the server. Raises StoreError."""
    # Imported lazily, because `kvloft config` must work if the extension cannot be loaded.
    from kvloft._core import Server

    config = options.config
    return Server(
        str(config.socket),
        host_bytes=config.host_size,
        eviction=config.eviction,
        disk_path=config.disk_path,
        disk_bytes=config.disk_bytes,
        disk_threads=config.disk_threads,
        shares=options.shares,
        numa=options.numa,
        limits=tenant_limits(config),
        settings=_texts(options),
    )


def _log_start(options: _Options, server: Any, log: Log, begun: Callable[[], None]) -> None:
    """Call ``begun``, and log the server's address, sizes and limits."""
    config, trouble = options.config, server.disk_trouble()
    if trouble is not None:
        warn(f"warning: {trouble}; using host memory only and retrying")
    warned_at = _place(sys.stderr)
    begun()
    bounds = f"; {text}" if (text := limits_text(_texts(options))) else ""
    host = size_text(config.host_size)
    disk = _disk(config, trouble, is_told=warned_at == _place(sys.stdout))
    log.tell(f"kvloft {BUILD} is listening on unix:{config.socket}: host {host}, {disk}{bounds}")


def _stop_line(config: Config) -> str:
    """Return the line to log when the server stops. Only a server with a disk tier has pending
    writes.
    """
    if config.disk_path is None:
        return "stopping; discarding all chunks in memory because there is no disk tier"
    return (
        f"stopping; writing pending chunks to disk for up to {CLOSE_TIMEOUT_S:g} s (a second "
        "signal stops immediately)"
    )


def _place(stream: IO[str]) -> tuple[int, int] | None:
    """Return the device and inode numbers of a stream's file, or None if they are unknown."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _disk(config: Config, trouble: str | None, *, is_told: bool) -> str:
    """Return a description of the disk for the startup log line. Omit any problem if ``is_told`` is
    True.
    """
    if config.disk_path is None:
        return "no disk"
    if trouble is None:
        return f"disk {config.disk_path} up to {size_text(config.disk_size)}"
    return f"disk {config.disk_path} not in use, retrying{'' if is_told else f' ({trouble})'}"


def _texts(options: _Options) -> dict[str, str]:
    """Return the settings as text, for `kvloft status` and for comparison with engine settings."""
    config, linger_s = options.config, options.linger_s
    linger = NONE if linger_s is None else KEYS["server_linger"].show(linger_s)
    share = ", ".join(f"{name} {percent}%" for name, percent in options.shares) or NONE
    nodes = ",".join(map(str, options.numa)) or NONE
    own = {key: value for key, value, _ in describe(config) if key in OF_STORE}
    if config.disk_path is None:
        del own["disk_size"]
    return own | {"server_linger": linger, "share": share, "numa": nodes}


def _wait(is_over: threading.Event, server: Any, linger_s: float | None, log: Log) -> None:
    """Wait until a signal arrives or no engine has been connected for ``linger_s`` seconds."""
    needed, num_joined = time.monotonic() + FIRST_ENGINE_S, 0
    while not is_over.wait(LOOK_EVERY_S):
        log.tell(*server.take_events())
        if linger_s is None:
            continue
        status = server.status()
        num_before, num_joined = num_joined, status["stats"]["server_joined"]
        # An engine may have connected and disconnected since the previous check.
        if num_joined > num_before or any(space["engines"] for space in status["namespaces"]):
            needed = time.monotonic()
        elif time.monotonic() - needed >= linger_s:
            log.tell(f"no engine has been connected for {linger_s:g} s")
            return


def _stop(is_over: threading.Event, begun_s: list[float], number: int) -> None:
    """Stop the server on the first signal, and exit immediately on the second.

    A second signal within ``TWICE_S`` is ignored, because timeout(1) sends each signal twice.
    """
    if not begun_s:
        begun_s.append(time.monotonic())
        is_over.set()
    elif time.monotonic() - begun_s[0] > TWICE_S:
        os._exit(128 + number)
