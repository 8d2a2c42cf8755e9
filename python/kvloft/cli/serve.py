"""`kvloft serve`: one cache for every engine of this user on this machine, in a process of its own.

It reads settings, waits for signals and tells what happens; everything else is the server's, in Rust.
"""

import argparse
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from kvloft.cli import metrics
from kvloft.cli.background import in_background
from kvloft.cli.log import Log, warn
from kvloft.cli.rules import NONE, rules
from kvloft.config import KEYS, MAX_SOCKET_BYTES, OF_STORE, Config, describe, load_config, parse_seconds, parse_socket, size_text
from kvloft.errors import ConfigError
from kvloft.limits import tenant_limits
from kvloft.machine import refuse_here, refuse_nodes, warnings
from kvloft.version import BUILD

COMMAND_LINE: Final = "command line"
"""As the origin of a setting."""
MAX_SHOWN: Final = 80
"""Characters of a wrong argument in an error."""
LOOK_EVERY_S: Final = 0.5
FIRST_ENGINE_S: Final = 60.0
"""What --linger adds before the first engine, which may still load its model's weights."""
CLOSE_TIMEOUT_S: Final = 60.0
TWICE_S: Final = 1.0
"""Signals that come so soon after the first are the same one."""
ENDS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a server with its last writes; the last is a terminal's that closes."""
OPTIONS: Final = {
    "host_size": "host memory for cached KV, taken as it is used",
    "disk_path": "directory of the disk tier; without it, a restart begins empty",
    "disk_size": "cap of the disk tier",
    "disk_threads": "threads that read and write the disk tier",
    "eviction": "adaptive or lru",
    "salt_quota": "most of a model's host memory that the requests of one cache_salt may have, such as 10%% or 8GiB",
    "salt_disk_quota": "the same of the disk",
    "salt_ttl": "forget what was saved so long ago with a cache_salt (24h, 7d), used since or not",
    "salt_limits": "a YAML file of limits of single salts",
}
DESCRIPTION: Final = """\
Serve one cache to every engine of this user on this machine, over a Unix
socket that only this user can open. No KV crosses the socket: engines map the
server's memory. What is not given here comes from KVLOFT_HOST_SIZE and so on,
from the YAML file that KVLOFT_CONFIG names, or is the default of
`kvloft config`.
"""
EPILOG: Final = """\
With "server": "auto" engines need none of this: the first one starts a server,
with its own settings, at a socket in $XDG_RUNTIME_DIR/kvloft or
/tmp/kvloft-UID, which ends 5 minutes after the last engine (server_linger).

Every engine that should share the cache gets one setting, in
kv_connector_extra_config or as KVLOFT_SERVER:

  "server": "unix:/run/user/1000/kvloft/kvloft.sock"

Engines of one model and one version of vLLM share KV: they are a namespace.
Each namespace has chunks of its own, on disk a folder of its own. Memory goes
to the namespaces that save; when there is no more, those with engines get
equal shares, or what --share says. An engine that is restarted finds what is
in the server's memory, as long as no other namespace wanted it. While no
server answers, engines compute; they connect again by themselves.

A tenant is a cache_salt. With --salt-quota, one that has its part of a model's
memory loses its own least recently used KV, never another's. With --salt-ttl,
its KV is forgotten so long after it was saved, on disk too. --salt-limits FILE
has other limits for single salts:

  - {salt_file: acme.salt, quota: 25%, disk_quota: 40%, ttl: 7d}
  - {salt: null, ttl: 30d}    # requests without a salt

SIGTERM, Ctrl-C or SIGHUP writes to disk what should be there, and ends.
`kvloft status --socket PATH` shows what it does.
"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "serve",
        help="share one cache among engines, and keep it over their restarts",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_socket(parser)
    for name, text in OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", help=text)
    parser.add_argument(
        "--linger", metavar="TIME", help="end when no engine was there for so long (30s, 5min); the first has a minute more"
    )
    parser.add_argument("--background", metavar="LOG", help="end once it listens, and serve on in the background with this log")
    parser.add_argument(
        "--share",
        action="append",
        default=[],
        metavar="NAMESPACE=PERCENT",
        help="a fixed share of host memory, by the first digits of a name that `kvloft status` prints; may be repeated",
    )
    parser.add_argument(
        "--numa", metavar="NODES", help="the NUMA node of each rank's GPU (0,0,1,1), or one for all: host memory lies there"
    )
    parser.add_argument("--metrics", metavar="[HOST:]PORT", help="answer Prometheus there; without a HOST, only this machine")
    parser.set_defaults(run=run)


def add_socket(parser: argparse.ArgumentParser) -> None:
    """What says where the server is."""
    parser.add_argument("--socket", metavar="PATH", help="where it listens; else the setting server (KVLOFT_SERVER) says so")


def settings(args: argparse.Namespace) -> Config:
    """Of the command line and everything behind it, with a ``server``. Raises ConfigError."""
    given = {name: value for name in OPTIONS if (value := getattr(args, name, None)) is not None}
    if args.socket == "auto":
        raise ConfigError("--socket auto: expected a path; for the socket of server = auto, set KVLOFT_SERVER=auto.")
    if args.socket is not None:
        given["server"] = f"unix:{_path(args.socket)}"
    config = load_config(given, extra_origin=COMMAND_LINE)
    if config.server is None:
        raise ConfigError("no socket is given; say --socket PATH, or set KVLOFT_SERVER=unix:PATH.")
    return config


def _path(text: str) -> str:
    try:
        return str(parse_socket(f"unix:{text.removeprefix('unix:')}"))
    except ValueError:
        shown = repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")
        raise ConfigError(f"--socket {shown}: expected a path of 1 to {MAX_SOCKET_BYTES} bytes.") from None


def shares(texts: list[str]) -> list[tuple[str, int]]:
    """Percent of host memory by namespace, of ``NAMESPACE=PERCENT``. Raises ConfigError."""
    found = []
    for text in texts:
        match = re.fullmatch(r"([0-9a-f]{1,64})=([0-9]{1,3})%?", text.lower())
        if match is None:
            raise ConfigError(f"--share {text!r}: expected NAMESPACE=PERCENT, such as 3f9a=25.")
        found.append((match[1], int(match[2])))
    return found


def nodes(text: str | None) -> list[int]:
    """NUMA nodes of ranks, of ``0,0,1,1``. Raises ConfigError also where this machine has no such node."""
    if text is None:
        return []
    if re.fullmatch(r"[0-9]{1,2}(,[0-9]{1,2})*", text) is None:
        raise ConfigError(f"--numa {text!r}: expected a node for each rank of an engine, such as 0,0,1,1, or one node for all.")
    found = [int(each) for each in text.split(",")]
    refuse_nodes(found)
    return found


def not_answered(error: Exception) -> int:
    """Tell why a server was not asked, and what to do if there is none; returns the exit status."""
    from kvloft._core import StoreError

    fix = "; start one with `kvloft serve`" if isinstance(error, StoreError) else ""
    if "timed out" in str(error):
        fix = "; the server's process is stopped or busy, and may still do what it was asked"
    print(f"kvloft: {error}{fix}", file=sys.stderr)
    return 1


def run(args: argparse.Namespace) -> int:
    """Serve until a signal, or until no engine was there for ``--linger``.

    Returns 0, 1 if another server has the socket or the system refuses, 2 for a wrong setting.
    """
    config, metrics_at = settings(args), metrics.address(args.metrics) if args.metrics is not None else None
    linger_s = _linger(args.linger)
    own_shares, numa = shares(args.share), nodes(args.numa)
    own = replace(config, server=None)  # its memory and its disk are this machine's
    refuse_here(own)
    for warning in warnings(own, opens_disk=True):
        warn(f"warning: {warning}")
    serve = partial(_serve, config, own_shares, numa, metrics_at, linger_s)
    _make_folder(config)
    if args.background is None:
        return serve(lambda: None)
    return in_background(serve, Path(args.background).absolute(), f"serves in the background at unix:{config.socket}")


def _make_folder(config: Config) -> None:
    """Make the socket's folder, for this user only, and say so; the server tells what is wrong with one that is there.

    Raises ConfigError where the folder above it is not there either: that is a typing error, or not mounted yet.
    """
    folder = Path(str(config.socket)).parent
    try:
        folder.mkdir(mode=0o700)
    except FileNotFoundError:
        raise ConfigError(f"{_given(config)}: {folder.parent} is not there; make it, or name another path.") from None
    except OSError:
        return
    warn(f"made {folder} for the socket; only this user may enter it")


def _given(config: Config) -> str:
    """The socket as it was given."""
    origin = config.origin("server")
    return f"--socket {config.socket}" if origin == COMMAND_LINE else f"server = unix:{config.socket} ({origin})"


def _linger(text: str | None) -> float | None:
    try:
        return parse_seconds(text) if text is not None else None
    except (ValueError, ArithmeticError):
        raise ConfigError(f"--linger {text!r}: expected a time of at most an hour, such as 300, 30s or 5min.") from None


def _serve(
    config: Config,
    own_shares: list[tuple[str, int]],
    numa: list[int],
    metrics_at: tuple[str, int] | None,
    linger_s: float | None,
    begun: Callable[[], None],
) -> int:
    # Here and not above: `kvloft config` must work where the extension does not load.
    from kvloft._core import ConfigError as PlaceError
    from kvloft._core import Server, StoreError

    is_over, begun_s, log = threading.Event(), list[float](), Log()
    told = _told(config, linger_s, own_shares, numa)
    for number in ENDS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda number, _frame: _stop(is_over, begun_s, number))
    try:
        server = Server(
            str(config.socket),
            host_bytes=config.host_size,
            eviction=config.eviction,
            disk_path=config.disk_path,
            disk_bytes=config.disk_bytes,
            disk_threads=config.disk_threads,
            shares=own_shares,
            numa=numa,
            limits=tenant_limits(config),
            settings=told,
        )
    except (PlaceError, StoreError) as e:
        warn(str(e))
        return 2 if isinstance(e, PlaceError) else 1
    end_metrics = None
    if metrics_at is not None:
        try:
            url, end_metrics = metrics.serve(metrics_at, server.status)
        except ConfigError:
            server.close(0.0)
            raise
    trouble = server.disk_trouble()
    if trouble is not None:
        warn(f"warning: {trouble}; there is host memory only until it can be used")
    told_at = _place(sys.stderr)
    begun()
    bounds = f"; {text}" if (text := rules(told)) else ""
    host, disk = size_text(config.host_size), _disk(config, trouble, is_told=told_at == _place(sys.stdout))
    log.tell(f"kvloft {BUILD} serves at unix:{config.socket}: host {host}, {disk}{bounds}")
    if end_metrics is not None:
        log.tell(f"metrics at {url}")
    _wait(is_over, server, linger_s, log)
    log.tell(f"ending; at most {CLOSE_TIMEOUT_S:g} s for what should be on disk (a second signal ends at once)")
    server.close(CLOSE_TIMEOUT_S)
    if end_metrics is not None:
        end_metrics()
    log.tell(*server.take_events(), "ended")
    log.end()
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)  # one that comes second would kill the interpreter while it ends
    return 0


def _place(stream: IO[str]) -> tuple[int, int] | None:
    """Where a stream goes, to compare; None where that cannot be said."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _disk(config: Config, trouble: str | None, *, is_told: bool) -> str:
    """What there is of a disk as it starts; the reason where it is not used, unless whoever reads this was told."""
    if config.disk_path is None:
        return "no disk"
    if trouble is None:
        return f"disk {config.disk_path} up to {size_text(config.disk_size)}"
    return f"disk {config.disk_path} not used for now, tried again{'' if is_told else f' ({trouble})'}"


def _told(config: Config, linger_s: float | None, own_shares: list[tuple[str, int]], numa: list[int]) -> dict[str, str]:
    """What it was started with, for people, and for engines, which compare their own settings with those of the same names."""
    linger = NONE if linger_s is None else KEYS["server_linger"].show(linger_s)
    share = ", ".join(f"{name} {percent}%" for name, percent in own_shares) or NONE
    nodes = ",".join(map(str, numa)) or NONE
    own = {key: value for key, value, _ in describe(config) if key in OF_STORE}
    if config.disk_path is None:
        del own["disk_size"]
    return own | {"server_linger": linger, "share": share, "numa": nodes}


def _wait(is_over: threading.Event, server: Any, linger_s: float | None, log: Log) -> None:
    """Until a signal, or until there was no engine for ``linger_s``."""
    needed, num_joined = time.monotonic() + FIRST_ENGINE_S, 0
    while not is_over.wait(LOOK_EVERY_S):
        log.tell(*server.take_events())
        if linger_s is None:
            continue
        status = server.status()
        came, num_joined = status["stats"]["server_joined"] > num_joined, status["stats"]["server_joined"]
        if came or _has_engines(status):  # some come and go between two looks
            needed = time.monotonic()
        elif time.monotonic() - needed >= linger_s:
            log.tell(f"no engine was connected for {linger_s:g} s")
            return


def _has_engines(status: dict[str, Any]) -> bool:
    return any(space["engines"] for space in status["namespaces"])


def _stop(is_over: threading.Event, begun_s: list[float], number: int) -> None:
    """A second signal ends at once; but some senders, such as timeout(1), send each twice."""
    if not begun_s:
        begun_s.append(time.monotonic())
        is_over.set()
    elif time.monotonic() - begun_s[0] > TWICE_S:
        os._exit(128 + number)
