"""Implements `server: auto`: a user's first engine on a machine starts a shared server.

The server runs in a separate session, so it does not receive signals sent to an engine and can
outlive the engines. It exits `server_linger` seconds after the last engine exits. If multiple
engines start concurrently, only one server binds the socket, and all engines use that server. This
module must not import vLLM.
"""

import contextlib
import logging
import os
import select
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvloft import _core
from kvloft.config.environment import server_environment
from kvloft.config.sources import describe
from kvloft.config.table import FROM_DEFAULT, KEYS, OF_LIMITS, Config
from kvloft.errors import MAY_PASS, ConfigError, StoreError

START_TIMEOUT_S: Final = 30.0
LOOK_EVERY_S: Final = 1.0
"""Interval at which the background thread checks whether the server or the engine has exited."""
START_EVERY_S: Final = 10.0
"""Minimum interval between an engine's attempts to start a server."""
INVALID_SETTING: Final = 2
"""Exit status of `kvloft serve` if a setting is invalid."""
_PEER: Final = struct.Struct("3i")
"""Format of SO_PEERCRED: the process id, user id and group id of a socket's peer."""


class _StartError(Exception):
    """The server could not be started, but a later attempt may succeed."""


def look_after(config: Config, logger: logging.Logger) -> Callable[[], None]:
    """Keep a server running at ``config.socket`` until the returned function is called.

    Raises ConfigError if the socket's directory is not private or the server rejects a setting.
    Other errors are logged as warnings, and a background thread retries. The engine runs without
    the cache until a server responds.
    """
    stop, last_warning = threading.Event(), ""
    try:
        _ensure_server(config, logger)
        _log_differences(config, logger)
    except _StartError as e:
        last_warning = str(e)
        logger.warning("kvloft: %s", last_warning)
    threading.Thread(
        target=_watch, args=(config, logger, stop, last_warning), name="kvloft-server", daemon=True
    ).start()
    return stop.set


def _watch(
    config: Config, logger: logging.Logger, stop: threading.Event, last_warning: str
) -> None:
    """Restart the server whenever it exits, until ``stop`` is set.

    A warning is logged only if it differs from the previous warning. ``last_warning`` is the
    warning that was logged before this call, or empty.
    """
    while not stop.wait(LOOK_EVERY_S):
        with contextlib.suppress(OSError):
            _wait_for_exit(_path(config), stop)
            continue
        try:
            _ensure_server(config, logger)
        except (ConfigError, _StartError) as e:
            if last_warning != str(e) and not stop.is_set():
                logger.warning("kvloft: %s", e)
            last_warning = str(e)
        stop.wait(START_EVERY_S)


def _ensure_server(config: Config, logger: logging.Logger) -> None:
    """Start a server if no server listens on the socket. Raises ConfigError or _StartError."""
    path = Path(_path(config))
    _make_private(path.parent)
    if _is_listening(path):
        return
    log = path.with_suffix(".log")
    try:
        done = subprocess.run(
            _command(config, log),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env=server_environment(),
            timeout=START_TIMEOUT_S,
            start_new_session=True,
        )
        status, errors = done.returncode, done.stderr.strip()
    except (OSError, subprocess.SubprocessError) as e:
        status, errors = 1, str(e)
    if status == 0:
        text = (
            "kvloft: started a server at unix:%s; it will exit %g s after the last engine exits "
            "(log file: %s)"
        )
        logger.info(text, path, config.server_linger, log)
        for line in errors.splitlines():
            logger.warning("%s", line)
    elif status == INVALID_SETTING:
        raise ConfigError(errors.removeprefix("kvloft: "))
    elif not _wait_for_server(path):
        raise _StartError(
            "could not start a server (server = auto); running without the cache until a server "
            f"responds. Run `kvloft serve --socket {path}`, or fix this error: "
            f"{errors.removeprefix('kvloft: ')}"
        )


def _command(config: Config, log: Path) -> list[str]:
    options = {
        "socket": _path(config),
        "host-size": f"{config.host_size}B",
        "eviction": config.eviction,
        "disk-threads": str(config.disk_threads),
        "linger": f"{config.server_linger:f}s",
        "background": str(log),
    }
    if config.disk_path is not None:
        options |= {"disk-path": config.disk_path, "disk-size": f"{config.disk_size}B"}
    for key in OF_LIMITS:
        if (value := getattr(config, key)) is not None:
            options[key.replace("_", "-")] = KEYS[key].show(value)
    argv = [sys.executable, "-P", "-m", "kvloft.cli", "serve"]
    return argv + [f"--{name}={value}" for name, value in options.items()]


def _log_differences(config: Config, logger: logging.Logger) -> None:
    """Log the settings in which this engine differs from the running server.

    Logs nothing if the server rejects the request, for example because the server runs a different
    version. The engine's connection attempt then logs the reason.
    """
    with contextlib.suppress(StoreError, ConfigError):
        settings = _core.server_status(_path(config))["settings"]
        differences = [
            f"{key} = {own} (server: {settings[key]})"
            for key, own, origin in describe(config)
            if settings.get(key, own) != own
            and (origin != FROM_DEFAULT or (key == "disk_size" and config.disk_path is not None))
        ]
        if differences:
            text = "kvloft: the server at unix:%s overrides these engine settings: %s"
            logger.warning(text, _path(config), ", ".join(differences))


def _path(config: Config) -> str:
    assert config.socket is not None
    return config.socket


def _make_private(folder: Path) -> None:
    """Create the directory if necessary, and check that it is private.

    Raises ConfigError or _StartError.
    """
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as e:
        if e.errno in MAY_PASS:
            raise _StartError(
                f"cannot create {folder} ({e.strerror}); running without the cache until a server "
                "responds"
            ) from e
        raise ConfigError(
            f"cannot create {folder} for server = auto ({e.strerror}); set server to a path."
        ) from e
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"cannot use {folder} for server = auto: it must be a directory that this user owns "
            "and that no other user can write to; remove it, or set server to a path."
        )


def _connect(path: str | Path) -> int:
    """Return the server's process id, or 0 if the server runs in a different container.

    Raises OSError if no server is listening.
    """
    with socket.socket(socket.AF_UNIX) as own:
        own.settimeout(START_TIMEOUT_S)
        own.connect(str(path))
        peer = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        return int(_PEER.unpack(peer)[0])


def _is_listening(path: str | Path) -> bool:
    try:
        _connect(path)
    except OSError:
        return False
    return True


def _wait_for_server(path: Path) -> bool:
    """Wait for a server that another engine may be starting. Return False after a timeout."""
    deadline = time.monotonic() + START_TIMEOUT_S / 3
    while not (is_listening := _is_listening(path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_listening


def _wait_for_exit(path: str, stop: threading.Event) -> None:
    """Wait until the server exits or ``stop`` is set. Raises OSError if no server is listening."""
    pid = _connect(path)
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return  # the server exited or runs in a different container; the caller reconnects
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        while not stop.is_set() and not poll.poll(LOOK_EVERY_S * 1000):
            pass
    finally:
        os.close(process)
