"""`server: auto`: one server of this user on this machine, started by the first engine.

The server has its own session, so it outlives engines and their signals, and exits some time after
the last engine. If several engines start at once, one gets the socket and the others use its
server. Must not depend on vLLM.
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
"""Time limit for the start of a server."""
LOOK_EVERY_S: Final = 1.0
START_EVERY_S: Final = 10.0
"""Minimum time between two starts by one engine."""
WRONG_SETTING: Final = 2
"""Exit status of `kvloft serve` for a wrong setting."""
_PEER: Final = struct.Struct("3i")
"""Process, user and group of a socket's peer."""


class _StartError(Exception):
    """The server could not be started, for a reason that can pass."""


def look_after(config: Config, logger: logging.Logger) -> Callable[[], None]:
    """Keep a server running at ``config.socket`` until the returned function is called.

    Raises ConfigError if the socket's directory is not private or the server refuses a setting.
    Other problems are warnings and are retried: until a server answers, requests are computed.
    """
    ended, told = threading.Event(), ""
    try:
        _ensure(config, logger)
        _tell_differences(config, logger)
    except _StartError as e:
        told = str(e)
        logger.warning("kvloft: %s", told)
    threading.Thread(
        target=_watch, args=(config, logger, ended, told), name="kvloft-server", daemon=True
    ).start()
    return ended.set


def _watch(config: Config, logger: logging.Logger, ended: threading.Event, told: str) -> None:
    """Start a server whenever none runs. ``told`` is the last warning, which is not repeated."""
    while not ended.wait(LOOK_EVERY_S):
        with contextlib.suppress(OSError):
            _wait_for_end(_path(config), ended)
            continue
        try:
            _ensure(config, logger)
        except (ConfigError, _StartError) as e:
            if told != str(e) and not ended.is_set():
                logger.warning("kvloft: %s", e)
            told = str(e)
        ended.wait(START_EVERY_S)


def _ensure(config: Config, logger: logging.Logger) -> None:
    """Start a server unless one listens. Raises ConfigError or _StartError."""
    path = Path(_path(config))
    _make_private(path.parent)
    if _is_there(path):
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
        status, said = done.returncode, done.stderr.strip()
    except (OSError, subprocess.SubprocessError) as e:
        status, said = 1, str(e)
    if status == 0:
        text = (
            "kvloft: started a server at unix:%s, which exits %g s after its last engine; its log "
            "is %s"
        )
        logger.info(text, path, config.server_linger, log)
        for line in said.splitlines():
            logger.warning("%s", line)
    elif status == WRONG_SETTING:
        raise ConfigError(said.removeprefix("kvloft: "))
    elif not _comes(path):  # and no other engine started one
        raise _StartError(
            "the server of server = auto could not be started, so requests are computed until one "
            "answers; start one with "
            f"`kvloft serve --socket {path}`, or fix this: {said.removeprefix('kvloft: ')}"
        )


def _command(config: Config, log: Path) -> list[str]:
    told = {
        "socket": _path(config),
        "host-size": f"{config.host_size}B",
        "eviction": config.eviction,
        "disk-threads": str(config.disk_threads),
        "linger": f"{config.server_linger:g}s",
        "background": str(log),
    }
    if config.disk_path is not None:
        told |= {"disk-path": config.disk_path, "disk-size": f"{config.disk_size}B"}
    for key in OF_LIMITS:
        if (value := getattr(config, key)) is not None:
            told[key.replace("_", "-")] = KEYS[key].show(value)
    argv = [sys.executable, "-P", "-m", "kvloft.cli", "serve"]
    return argv + [f"--{name}={value}" for name, value in told.items()]


def _tell_differences(config: Config, logger: logging.Logger) -> None:
    """Log settings that differ from the server's, which the engine that started it decided."""
    with contextlib.suppress(StoreError):
        its = _core.server_status(_path(config))["settings"]
        differences = [
            f"{key} = {own} here and {its[key]} there"
            for key, own, origin in describe(config)
            if its.get(key, own) != own
            and (origin != FROM_DEFAULT or (key == "disk_size" and config.disk_path is not None))
        ]
        if differences:
            text = (
                "kvloft: settings of this engine are ignored, because the server at unix:%s was "
                "started with others: %s"
            )
            logger.warning(text, _path(config), ", ".join(differences))


def _path(config: Config) -> str:
    assert config.socket is not None
    return config.socket


def _make_private(folder: Path) -> None:
    """Create the directory, or check that it is private. Raises ConfigError or _StartError."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as e:
        if e.errno in MAY_PASS:
            raise _StartError(
                f"{folder} cannot be created ({e.strerror}), so requests are computed until a "
                "server answers"
            ) from e
        raise ConfigError(
            f"{folder} cannot be created for server = auto ({e.strerror}); set server to a path."
        ) from e
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{folder} is not a directory of this user or is writable by others, so server = auto "
            "does not use it; remove it, or set server to a path."
        )


def _connect(path: str | Path) -> int:
    """Return the server's process id; 0 in another container. Raises OSError without a server."""
    with socket.socket(socket.AF_UNIX) as own:
        own.settimeout(START_TIMEOUT_S)
        own.connect(str(path))
        peer = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        return int(_PEER.unpack(peer)[0])


def _is_there(path: str | Path) -> bool:
    try:
        _connect(path)
    except OSError:
        return False
    return True


def _comes(path: Path) -> bool:
    """Return True once a server listens that another engine is starting; False after a time-out."""
    deadline = time.monotonic() + START_TIMEOUT_S / 3
    while not (is_there := _is_there(path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_there


def _wait_for_end(path: str, ended: threading.Event) -> None:
    """Wait for the end of the server or of this engine. Raises OSError without a server."""
    pid = _connect(path)
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return  # in another container, or gone: the next call finds out
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        while not ended.is_set() and not poll.poll(LOOK_EVERY_S * 1000):
            pass
    finally:
        os.close(process)
