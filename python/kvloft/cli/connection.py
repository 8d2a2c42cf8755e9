"""Finds the server for a command, and reports an error if no server responds.

This module must not import the extension or slow modules, because `kvloft serve` imports it.
"""

import argparse
import contextlib
import os
from pathlib import Path
from typing import Final

from kvloft.cli import warn
from kvloft.config.environment import MAX_SOCKET_BYTES, auto_socket, connection_environment
from kvloft.config.sources import load_config
from kvloft.config.table import OF_STORE, Config, parse_socket
from kvloft.errors import ConfigError, DeniedError, LateError, StoreError

COMMAND_LINE: Final = "command line"
SERVICE_SOCKET: Final = "/run/kvloft/kvloft.sock"
"""The socket of the systemd unit in examples/deploy."""
MAX_SHOWN: Final = 80
"""Maximum number of characters that an error message quotes from an invalid argument."""


def add_socket(parser: argparse.ArgumentParser) -> None:
    """Add --socket."""
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help=(
            "the server's socket (default: the `server` setting, for example from KVLOFT_SERVER; "
            "if unset, the standard socket, unless there are several)"
        ),
    )


def settings(args: argparse.Namespace) -> Config:
    """Return the settings from the command line and all other sources.

    Raises ConfigError if a setting is invalid or ``server`` is not set.
    """
    given = {name: value for name in OF_STORE if (value := getattr(args, name, None)) is not None}
    if args.socket is not None:
        given["server"] = f"unix:{_path(args.socket)}"
    config = load_config(given, extra_origin=COMMAND_LINE)
    if config.server is None:
        raise ConfigError(
            "no socket path given; use --socket PATH, or set KVLOFT_SERVER=unix:PATH."
        )
    return config


def socket_of(args: argparse.Namespace) -> str:
    """Return the server's socket path from the arguments or the ``server`` setting.

    The default is the standard socket, if only one exists. All other settings are ignored, even
    invalid values in the environment. Raises ConfigError, or StoreError if there is no server.
    """
    if args.socket is not None:
        return _path(args.socket)
    config = load_config({}, connection_environment(), is_complete=False)
    if config.socket is not None:
        return config.socket
    usual = [SERVICE_SOCKET, auto_socket()]
    found = [path for path in usual if os.path.exists(path) or _is_hidden(Path(path))]  # noqa: PTH110
    fix = "use --socket PATH, or set KVLOFT_SERVER=unix:PATH"
    if not found:
        raise StoreError(f"no server found at {' or '.join(usual)}; {fix}")
    if len(found) > 1:
        raise ConfigError(f"found multiple server sockets ({' and '.join(found)}); {fix}.")
    return found[0]


def _owner(path: Path) -> int:
    """Return the uid of the owner of ``path`` or, if it is inaccessible, of its nearest accessible
    parent.
    """
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return place.stat().st_uid
    return 0


def _user(uid: int) -> str:
    """Return the user's name, or ``'#UID'``, which sudo accepts, if the user has no name."""
    import pwd  # imported lazily: only needed for an error

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"'#{uid}'"


def available_bytes() -> int | None:
    """Return the free memory of this machine or container in bytes, or None if it is unknown."""
    try:  # `kvloft config` must work even if the extension cannot be loaded
        from kvloft._core import available_bytes as available
    except ImportError:
        return None
    return available()


def _is_hidden(socket: Path) -> bool:
    """Return True if this user has no access to the socket's directory."""
    folder = socket.parent
    try:
        return folder.is_dir() and not os.access(folder, os.X_OK)
    except PermissionError:  # an inaccessible parent directory
        return True


def _path(text: str) -> str:
    if text == "auto":
        raise ConfigError(
            "--socket auto: expected a path; to use the automatic server, set KVLOFT_SERVER=auto."
        )
    try:
        return str(parse_socket(f"unix:{text.removeprefix('unix:')}"))
    except ValueError:
        shown = repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")
        raise ConfigError(
            f"--socket {shown}: expected a path of 1 to {MAX_SOCKET_BYTES} bytes."
        ) from None


def report_no_answer(error: StoreError, args: argparse.Namespace) -> int:
    """Print why the server did not respond and how to fix the problem. Return the exit status."""
    fix = "start one with `kvloft serve`"
    if isinstance(error, DeniedError) and hasattr(args, "socket"):
        socket = socket_of(args)
        warn(
            f"user {_user(os.geteuid())} cannot open {socket}; run this as the socket's owner: "
            f"sudo -u {_user(_owner(Path(socket)))} {args.parser.prog}"
        )
        return 1
    if isinstance(error, LateError):
        fix = "the server process is stopped or busy, and may still execute the command"
    warn(f"{error}; {fix}")
    return 1
