"""What this machine says about settings before a model is known: what cannot work is refused, what may not is a warning.

It changes nothing and makes no directory. It must not know vLLM or the store.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvloft.config import AUTO, OF_LIMITS, Config, format_quota, format_size, size_text
from kvloft.errors import ConfigError
from kvloft.limits import given_limits, tenant_limits

SMALL: Final = 1 << 20
"""A size below this is hardly meant in bytes."""
SHORT_S: Final = 3600
"""An age below this is hardly meant in seconds."""
PROC: Final = Path("/proc")
MAX_LOCK_BYTES: Final = 32
"""Of the file by which a disk directory is known: it holds its owner's process."""


def refuse_impossible(config: Config) -> None:
    """Raise ConfigError where disk_path leads through something that is no directory, or salt_limits cannot be used."""
    if config.server in (None, AUTO):  # or the file is for the server's eyes only
        tenant_limits(config)
    if config.disk_path is None:
        return
    nearest = _nearest(Path(config.disk_path))
    if PROC in (nearest, *nearest.parents):
        raise ConfigError(
            f"disk_path = {config.disk_path} ({config.origin('disk_path')}) cannot be made, for {PROC} takes no directory; "
            "set disk_path to a writable local directory."
        )
    if not nearest.is_dir():
        raise ConfigError(
            f"disk_path = {config.disk_path} ({config.origin('disk_path')}) cannot be a directory, for {nearest} is a file; "
            "set disk_path to a writable local directory."
        )


def refuse_here(config: Config) -> None:
    """Raise ConfigError where no engine can start with these settings on this machine.

    A disk_path that this user may not write is none of them: rights are given, disks emptied and file systems mounted while host
    memory serves.
    """
    refuse_impossible(config)
    text = _memory(config.host_size)
    if text is not None:
        raise ConfigError(f"{text} Set another host_size; this value came from {_source(config.origin('host_size'))}.")


def _source(origin: str) -> str:
    return f"the {origin}" if origin in ("default", "command line") else origin


def refuse_nodes(nodes: Sequence[int], status: Path = Path("/proc/self/status")) -> None:
    """Raise ConfigError for NUMA nodes that this process may have no memory of, as far as the system says (``status``)."""
    try:
        lists = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("Mems_allowed_list:")]
    except (OSError, IndexError):
        return
    for text in lists:
        ends = [tuple(map(int, part.split("-"))) for part in text.split(",")]
        unknown = [node for node in nodes if not any(end[0] <= node <= end[-1] for end in ends)]
        if unknown:
            raise ConfigError(
                f"--numa: NUMA node {unknown[0]} is not there, or not for this process; what it may use is {text} "
                "(see `nvidia-smi topo -m` for each GPU's node)."
            )


def warnings(config: Config, *, opens_disk: bool = False) -> list[str]:
    """One sentence for each setting that this machine may not have room or rights for.

    Who ``opens_disk`` at once tells by itself whose the directory is.
    """
    if config.server is not None:
        return _bare(config) if config.server == AUTO else []  # the memory and the disk are the server's, which looks itself
    found = [*_bare(config), _memory(config.host_size), *_in_vain(config)]
    if config.disk_path is not None:
        path = Path(config.disk_path)
        rights = _rights(path)
        looks = [_room(path, config.disk_size), _company(path)] if rights is None else []
        found += looks if opens_disk else [rights or _others(path), *looks]
        found.append(_nested(path))
    return [text for text in found if text is not None]


def _bare(config: Config) -> list[str]:
    """Numbers without a unit that hardly mean what they say."""
    numbers = [(f"{key} = {number} ({config.origin(key)})", key, number) for key, number in config.bare_numbers.items()]
    if config.server != AUTO:  # the server reads the file itself
        numbers += [
            (f"{each.blame} = {each.value}", each.setting, int(each.value)) for each in given_limits(config) if each.is_bare
        ]
    return [
        f"{what} has no unit, so it is in {unit}; did you mean {number}{meant}?"
        for what, key, number in numbers
        for unit, meant, most in [("seconds", "h", SHORT_S) if key == "salt_ttl" else ("bytes", _unit(key, number), SMALL)]
        if 0 < number < most
    ]


def _unit(key: str, size: int) -> str:
    return "%" if key in OF_LIMITS and size <= 100 else "MiB"


def _in_vain(config: Config) -> Iterator[str]:
    """Quotas that bound nothing, and one that leaves nothing."""
    if config.salt_quota == 0 and config.salt_limits is None:  # beside that file, only its salts are kept
        given = f"salt_quota = {format_quota(config.salt_quota)} ({config.origin('salt_quota')})"
        yield f"{given} keeps nothing of what has a cache_salt; leave it out for no limit."
    wholes = {"salt_quota": "host_size", "salt_disk_quota": "disk_size"}
    for key in wholes:
        if getattr(config, key) == 1.0 and isinstance(getattr(config, key), float):
            all_of = "what its namespace may have of host memory" if key == "salt_quota" else "disk_size"
            yield f"{key} = 100% ({config.origin(key)}) is all of {all_of}, so it limits nothing; leave it out for no limit."
    quotas = [(key, f" ({config.origin(key)})", key, quota) for key in wholes if (quota := getattr(config, key)) is not None]
    quotas += [(each.blame, "", each.setting, each.value) for each in given_limits(config) if each.setting in wholes]
    for name, origin, key, quota in quotas:
        whole = getattr(config, wholes[key])
        if key == "salt_disk_quota" and config.disk_path is None:
            yield f"{name} = {format_quota(quota)} does nothing without disk_path."
        elif isinstance(quota, int) and quota > whole:
            given, least = format_size(quota), format_size(whole)
            yield f"{name} = {given}{origin} is more than {wholes[key]} = {least}, so it limits nothing."


def _nearest(path: Path) -> Path:
    """The closest place that is there, as far as this user can see."""
    return next((place for place in (path, *path.parents) if os.path.exists(place)), path)  # noqa: PTH110 (Path's raises for what is hidden)


def _memory(host_size: int) -> str | None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if host_size <= memory:
        return None
    return (
        f"host_size = {format_size(host_size)} is more than this machine's memory of {size_text(memory)}; "
        "an engine does not start with it here."
    )


def _rights(path: Path) -> str | None:
    nearest = _nearest(path)
    if os.access(nearest, os.W_OK | os.X_OK) and PROC not in (nearest, *nearest.parents):
        return None
    return f"disk_path = {path} cannot be made or written here, for {nearest} is not writable."


def _others(path: Path) -> str | None:
    if not path.is_dir():
        return None
    found = path.stat()
    if found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        return None
    return (
        f"disk_path = {path} belongs to another user or may be written by others (mode {found.st_mode & 0o7777:o}), so it is not "
        f"used: run `chown {os.geteuid()} {path}` and `chmod go-w {path}`, or set another disk_path."
    )


def _room(path: Path, disk_size: int) -> str | None:
    """What the directory holds already counts as room."""
    try:
        free = shutil.disk_usage(_nearest(path)).free
        ours = sum(file.stat().st_blocks * 512 for file in path.glob("*/*.dat"))
    except OSError:
        return None
    if disk_size <= free + ours:
        return None
    return (
        f"disk_size = {format_size(disk_size)} is more than the {size_text(free + ours)} that disk_path = {path} has room for; "
        "when the disk is full, chunks take the place of others or are dropped and counted (disk_dropped)."
    )


def _company(path: Path) -> str | None:
    try:
        names = [each.name for each in path.iterdir()]
    except OSError:
        return None
    if not names or "lock" in names:
        return None
    return f"disk_path = {path} holds files that are not kvloft's; they stay, but a directory of its own is easier to clean up."


def _nested(path: Path) -> str | None:
    """What lies in another's directory counts against no disk_size there, and goes with it."""
    for above in Path(os.path.realpath(path)).parents:
        lock = above / "lock"
        try:
            is_disk = lock.is_file() and lock.stat().st_size <= MAX_LOCK_BYTES and lock.read_text().strip().isdecimal()
        except (OSError, ValueError):
            continue
        if is_disk:
            return (
                f"disk_path = {path} lies in {above}, which is the disk directory of another engine or server: its disk_size does "
                "not count what is here, and who deletes it deletes this; set disk_path to a directory of its own."
            )
    return None
