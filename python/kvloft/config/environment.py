"""Reads kvloft's and the engine's environment variables. No other module reads the environment."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

ENV_PREFIX: Final = "KVLOFT_"
ENV_FILE: Final = "KVLOFT_CONFIG"
"""Environment variable that names a YAML file with settings."""
MAX_SOCKET_BYTES: Final = 107
"""Maximum length of a Unix socket path."""
_KUBERNETES: Final = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$"
)
"""Matches variables that are not settings: Kubernetes injects them for a Service named "kvloft...".
"""


def environment() -> Mapping[str, str]:
    """Return this process's environment."""
    return os.environ


def setting_variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield (variable, key, value) for each setting in ``environ``, sorted by variable."""
    for name, value in sorted(environ.items()):
        is_ours = name.startswith(ENV_PREFIX) and name != ENV_FILE
        if is_ours and value and not _KUBERNETES.search(name):
            suffix = name.removeprefix(ENV_PREFIX)
            yield name, suffix.lower() if suffix.isupper() else suffix, value


def engine_environment(names: Iterable[str]) -> list[str]:
    """Return ``NAME=value`` for each variable in ``names`` that is set."""
    return [f"{name}={os.environ[name]}" for name in names if name in os.environ]


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return a child process's environment: a copy of this environment with ``changes`` applied."""
    return {**os.environ, **changes}


def server_environment() -> dict[str, str]:
    """Return a server's environment without the settings, which are passed on its command line."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}


def connection_environment() -> dict[str, str]:
    """Return the variables that a command needs to find a server."""
    names = (ENV_FILE, f"{ENV_PREFIX}SERVER")
    return {name: os.environ[name] for name in names if name in os.environ}


def auto_socket() -> str:
    """Return the socket path for ``server = auto``, in the user's runtime directory or in /tmp."""
    run = os.environ.get("XDG_RUNTIME_DIR", "")
    places = [f"{run}/kvloft/auto.sock"] if os.path.isabs(run) and _is_own(run) else []  # noqa: PTH117
    places.append(f"/tmp/kvloft-{os.geteuid()}/auto.sock")
    return next((place for place in places if len(place.encode()) <= MAX_SOCKET_BYTES), places[-1])


def _is_own(folder: str) -> bool:
    """Return True if this user owns the directory. `su` may keep another user's environment
    variables.
    """
    try:
        return os.path.isdir(folder) and os.stat(folder).st_uid == os.geteuid()  # noqa: PTH112, PTH116
    except OSError:
        return False
