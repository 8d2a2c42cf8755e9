"""Checks settings against this machine before the model is known. Settings that cannot work cause
errors; settings that probably will not work cause warnings.

The checks have no side effects. This module must not import vLLM or the store.
"""

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvloft.config.table import AUTO, OF_LIMITS, OF_STORE, Config
from kvloft.config.units import format_quota, format_size, size_text
from kvloft.errors import ConfigError, ShortageError
from kvloft.limits import given_limits, tenant_limits

SMALL: Final = 1 << 20
"""Sizes below this value that have no unit were probably not meant in bytes."""
SHORT_S: Final = 3600
"""Times below this value that have no unit were probably not meant in seconds."""
MAX_BARE_TIMEOUT_S: Final = 0.9
"""A server_timeout above this value that has no unit was probably meant in milliseconds."""
PROC: Final = Path("/proc")
MAX_LOCK_BYTES: Final = 32
"""Maximum size of a disk directory's lock file, which holds the owner's process id."""


def refuse_impossible(config: Config) -> None:
    """Raise ConfigError if disk_path cannot be a directory or salt_limits is invalid."""
    if config.server in (None, AUTO):  # otherwise, the server reads the file
        tenant_limits(config)
    if config.disk_path is None:
        return
    nearest = _nearest(Path(config.disk_path))
    if PROC in (nearest, *nearest.parents):
        problem = f"cannot be created, because {PROC} is not writable"
    elif not nearest.is_dir():
        problem = f"cannot be a directory, because {nearest} is a file"
    else:
        return
    raise ConfigError(
        f"disk_path = {config.disk_path} ({config.origin('disk_path')}) {problem}; set disk_path "
        "to a writable local directory."
    )


def refuse_here(config: Config, available_bytes: int | None = None) -> None:
    """Raise ConfigError if no engine can start with these settings on this machine.

    Raises ShortageError if too little memory is currently free.

    ``available_bytes`` is the amount of free memory, if known. An unwritable disk_path is not an
    error: permissions, free space and mounts can change while the engine runs on host memory.
    """
    refuse_impossible(config)
    if config.server not in (None, AUTO):  # the server has a separate host_size
        return
    # With `auto`, a running server may already hold this memory.
    left = available_bytes if config.server is None else None
    too_much = f"host_size = {format_size(config.host_size)} ({config.origin('host_size')}) is more"
    if config.host_size > (memory := _machine_bytes()):
        raise ConfigError(f"{too_much} than this machine's memory ({size_text(memory)}); lower it.")
    if left is not None and config.host_size > left:
        raise ShortageError(
            f"{too_much} than the {size_text(left)} that this machine or container has left; lower "
            "it, or free memory and retry."
        )


def refuse_nodes(nodes: Sequence[int], status: Path = Path("/proc/self/status")) -> None:
    """Raise ConfigError if, according to ``status``, this process cannot use all ``nodes``."""
    try:
        lines = status.read_text().splitlines()
        lists = [line.split()[1] for line in lines if line.startswith("Mems_allowed_list:")]
    except (OSError, IndexError):
        return
    for text in lists:
        ends = [tuple(map(int, part.split("-"))) for part in text.split(",")]
        unknown = [node for node in nodes if not any(end[0] <= node <= end[-1] for end in ends)]
        if unknown:
            raise ConfigError(
                f"--numa: NUMA node {unknown[0]} does not exist or is not allowed for this "
                f"process; allowed nodes: {text} (see `nvidia-smi topo -m` for each GPU's node)."
            )


def warnings(config: Config, *, opens_disk: bool = False) -> list[str]:
    """Return a sentence for each setting that probably will not work on this machine.

    If ``opens_disk`` is True, skip checks that the caller repeats when it opens the disk directory.
    """
    if config.server is not None:  # the server checks its memory and disk
        return _bare(config)
    found = [*_bare(config), _memory(config.host_size), *_in_vain(config)]
    if config.disk_path is not None:
        path = Path(config.disk_path)
        rights = _rights(path)
        looks = [_room(path, config.disk_size), _company(path)] if rights is None else []
        found += looks if opens_disk else [rights or _others(path), *looks]
        found.append(_nested(path))
    return [text for text in found if text is not None]


def _bare(config: Config) -> list[str]:
    """Return a warning for each number whose unit was probably left out by mistake."""
    numbers = [
        (f"{key} = {_shown(number)} ({config.origin(key)})", key, number)
        for key, number in config.bare_numbers.items()
        if config.server in (None, AUTO) or key not in OF_STORE
    ]
    if config.server is None:  # the server reads the file itself
        numbers += [
            (f"{each.blame} = {each.value}", each.setting, int(each.value))
            for each in given_limits(config)
            if each.is_bare
        ]
    return [
        f"{what} has no unit, so it is read as {unit}; did you mean {_shown(number)}{meant}?"
        for what, key, number in numbers
        for unit, meant, low, high in [_meant(key, number)]
        if low < number < high
    ]


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def _meant(key: str, number: float) -> tuple[str, str, float, float]:
    """Return a bare number's unit, the unit the user probably meant, and the suspicious range."""
    if key == "salt_ttl":
        return "seconds", "h", 0, SHORT_S
    if key == "server_timeout":
        return "seconds", "ms", MAX_BARE_TIMEOUT_S, math.inf
    return "bytes", "%" if key in OF_LIMITS and number <= 100 else "MiB", 0, SMALL


def _in_vain(config: Config) -> Iterator[str]:
    """Yield a warning for each quota that has no effect or prevents all saves."""
    # With salt_limits, a quota of 0 is valid: only tenants in the file can save chunks.
    if config.salt_quota == 0 and config.salt_limits is None:
        given = f"salt_quota = {format_quota(config.salt_quota)} ({config.origin('salt_quota')})"
        yield f"{given} prevents all saves for requests with a cache_salt; remove the setting."
    wholes = {"salt_quota": "host_size", "salt_disk_quota": "disk_size"}
    for key in wholes:
        if getattr(config, key) == 1.0 and isinstance(getattr(config, key), float):
            all_of = "the namespace's host memory" if key == "salt_quota" else "disk_size"
            yield (
                f"{key} = 100% ({config.origin(key)}) covers all of {all_of}, so it has no effect; "
                "remove the setting."
            )
    quotas = [
        (key, f" ({config.origin(key)})", key, quota)
        for key in wholes
        if (quota := getattr(config, key)) is not None
    ]
    quotas += [
        (each.blame, "", each.setting, each.value)
        for each in given_limits(config)
        if each.setting in wholes
    ]
    for name, origin, key, quota in quotas:
        whole = getattr(config, wholes[key])
        if key == "salt_disk_quota" and config.disk_path is None:
            yield f"{name} = {format_quota(quota)} has no effect without disk_path."
        elif isinstance(quota, int) and quota > whole:
            given, least = format_size(quota), format_size(whole)
            yield (
                f"{name} = {given}{origin} is more than {wholes[key]} = {least}, so it has no "
                "effect."
            )


def _nearest(path: Path) -> Path:
    """Return the path, or its nearest ancestor that exists and is visible to this user."""
    # Path.exists raises an exception if the path is in an unreadable directory.
    return next((place for place in (path, *path.parents) if os.path.exists(place)), path)  # noqa: PTH110


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory(host_size: int) -> str | None:
    memory = _machine_bytes()
    if host_size <= memory:
        return None
    return (
        f"host_size = {format_size(host_size)} is more than this machine's memory "
        f"({size_text(memory)}); an engine with this setting cannot start here."
    )


def _rights(path: Path) -> str | None:
    nearest = _nearest(path)
    if nearest not in (path, path.parent) and PROC not in (nearest, *nearest.parents):
        return (
            f"disk_path = {path} is not used, because {path.parent} does not exist; mount its file "
            f"system, or run `mkdir -p {path.parent}`."
        )
    if os.access(nearest, os.W_OK | os.X_OK) and PROC not in (nearest, *nearest.parents):
        return None
    user = os.geteuid()
    if nearest == path:
        return (
            f"disk_path = {path} is not writable by this user, so it is not used; run "
            f"`chown -R {user} {path}` as root."
        )
    return (
        f"disk_path = {path} cannot be created, because {nearest} is not writable by this user; "
        f"run `mkdir {path} && chown {user} {path}` as root."
    )


def _others(path: Path) -> str | None:
    if not path.is_dir():
        return None
    found = path.stat()
    if found.st_mode & 0o022:
        return (
            f"disk_path = {path} is writable by other users (mode {found.st_mode & 0o7777:o}), so "
            f"it is not used; set disk_path = {path}/kvloft, which kvloft creates for this user "
            "only."
        )
    if found.st_uid != (user := os.geteuid()):
        return (
            f"disk_path = {path} belongs to user {found.st_uid}, so it is not used; run "
            f"`chown -R {user} {path}` as root, or set another disk_path."
        )
    return None


def _room(path: Path, disk_size: int) -> str | None:
    """Return a warning if disk_size exceeds the free space plus the size of existing files."""
    try:
        free = shutil.disk_usage(_nearest(path)).free
        ours = sum(file.stat().st_blocks * 512 for file in path.glob("*/*.dat"))
    except OSError:
        return None
    if disk_size <= free + ours:
        return None
    return (
        f"disk_size = {format_size(disk_size)} is more than the {size_text(free + ours)} available "
        f"at disk_path = {path}; when the disk is full, new chunks replace old chunks or are "
        "dropped and counted (disk_dropped)."
    )


def _company(path: Path) -> str | None:
    try:
        names = [each.name for each in path.iterdir()]
    except OSError:
        return None
    if not names or "lock" in names:
        return None
    return (
        f"disk_path = {path} contains files that do not belong to kvloft; kvloft keeps them, but a "
        "dedicated directory is easier to delete."
    )


def _nested(path: Path) -> str | None:
    """Return a warning if the directory is inside another disk directory."""
    for above in Path(os.path.realpath(path)).parents:
        lock = above / "lock"
        try:
            is_small = lock.is_file() and lock.stat().st_size <= MAX_LOCK_BYTES
            is_disk = is_small and lock.read_text().strip().isdecimal()
        except (OSError, ValueError):
            continue
        if is_disk:
            return (
                f"disk_path = {path} is inside {above}, which is the disk directory of another "
                f"engine or server. That engine or server does not count {path} toward its "
                f"disk_size, and removing {above} would also delete {path}. Set disk_path to a "
                "separate directory."
            )
    return None
