"""Identifies an engine's weights by their files or commit. Engines share KV only if their weights
are identical.

vLLM does not report the loaded weights to connectors, so kvloft reads the files, which must not
have changed since the engine process started. For weights that it cannot identify, kvloft uses an
identity unique to this run: an unnecessary miss costs only time, but a wrong hit produces wrong
output. An unreadable file is not an error.
"""

import hashlib
import logging
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final
from uuid import uuid4

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from vllm import envs

logger = logging.getLogger("vllm.kvloft")

MAX_ENTRIES: Final = 10_000
"""Maximum number of files and directories to check. Beyond this limit, the weights count as
unknown.
"""
MAX_LINKS: Final = 64
LOOK_TIMEOUT_S: Final = 0.5
FILE_FORMATS: Final = {
    *("auto", "hf", "pt", "safetensors", "npcache", "gguf", "mistral", "bitsandbytes"),
    *("sharded_state", "fastsafetensors", "runai_streamer", "runai_streamer_sharded"),
}
"""Load formats that read the weights from the model's directory."""
_SAMPLE_BYTES = 1 << 16
_registered_s = 0.0


def note_start() -> None:
    """Record the time at which vLLM loads its plugins. vLLM loads weights later."""
    global _registered_s
    _registered_s = _registered_s or time.time()


def engine_start_s() -> float:
    """Return the start time of this process's engine as a Unix timestamp.

    If a file has not changed since then, the engine has loaded the file's current content.
    """
    try:
        started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        since_boot = int(started) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
    except (OSError, ValueError, IndexError):  # /proc is not available
        return _registered_s
    return max(time.time() - age, _registered_s)


@dataclass(frozen=True, slots=True)
class Look:
    """The files under a path as (name, size, mtime in ns, ctime in ns), and the latest change
    time.
    """

    root: str
    files: tuple[tuple[bytes, int, int, int], ...]
    latest_s: float

    def fingerprint(self) -> str:
        """Return a digest of the names, sizes, times and samples of all files."""
        digest = hashlib.blake2b(digest_size=16)
        for name, size, mtime, ctime in self.files:
            digest.update(b"%d|%s|%d|%d|%d|" % (len(name), name, size, mtime, ctime))
            root = os.fsencode(self.root)
            path = os.path.join(root, name) if name else root  # noqa: PTH118
            for sample in _samples(path, size):
                digest.update(sample)
        return digest.hexdigest()


def look(path: str, *, below: bool = True) -> Look | None:
    """Return the files of a local model or adapter, excluding hidden files. With ``below``, include
    subdirectories.

    Returns None if there are no files, too many files, or a read error.
    """
    if not path:
        return None
    try:
        # pathlib raises RuntimeError for unknown users.
        root = os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111
        latest = max(_links_to(root), default=0.0)
        entries = list(_entries(os.fsencode(root), below=below))
    except (OSError, ValueError, RuntimeError) as error:
        logger.debug("kvloft: cannot read files in %.200s: %.200s", path, error)
        return None
    files = []
    for name, status, times in entries:
        latest = max(latest, *times)
        if stat.S_ISREG(status.st_mode):
            files.append((name, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return Look(root, tuple(sorted(files)), latest) if files else None


Seen = tuple[Look | None, str | None]
"""An adapter's files and, if there are none, its commit on the hub."""


class LooksInTime:
    """Checks directories in a separate thread, so that a hung file system cannot block the
    scheduler.

    A process can run many engines in sequence, so the thread exits when this object is closed or
    garbage-collected.
    """

    def __init__(self, timeout_s: float = LOOK_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._asked: SimpleQueue[tuple[str, Future[Seen]] | None] = SimpleQueue()
        self._last: Future[Seen] | None = None
        self._end: Callable[[], object] = lambda: None

    def close(self) -> None:
        """Stop the thread, if there is one, after its current check. Call no method afterwards."""
        self._end()

    def look(self, path: str) -> Seen:
        """Run `look` in the thread, then `hub_commit` if there are no files. Skip subdirectories,
        which vLLM ignores in adapters.

        Raises TimeoutError after the timeout, or immediately while the previous check is still
        running.
        """
        if self._last is None:
            threading.Thread(
                target=_look_when_asked, args=(self._asked,), name="kvloft-looks", daemon=True
            ).start()
            self._end = weakref.finalize(self, self._asked.put, None)
        elif not self._last.done():
            raise TimeoutError(path)
        self._last = Future()
        self._asked.put((path, self._last))
        return self._last.result(self._timeout_s)


def _look_when_asked(asked: SimpleQueue[tuple[str, Future[Seen]] | None]) -> None:
    while (each := asked.get()) is not None:
        path, answer = each
        try:
            files = look(path, below=False)
            answer.set_result((files, hub_commit(path) if files is None and path else None))
        except Exception:
            logger.exception("kvloft: failed to read files in %.200s", path)
            answer.set_exception(TimeoutError(path))


def _entries(
    root: bytes, *, below: bool
) -> Iterator[tuple[bytes, os.stat_result, tuple[float, ...]]]:
    """Yield ``root`` and all entries under it as (name, target status, times)."""
    todo, count = [b""], 0
    folders: set[tuple[int, int]] = set()
    while todo:
        name = todo.pop()
        path = os.path.join(root, name) if name else root  # noqa: PTH118 - root can be a file
        if (count := count + 1) > MAX_ENTRIES:
            raise ValueError(f"more than {MAX_ENTRIES} files and directories")
        try:
            own = os.lstat(path)
            status = os.stat(path)  # noqa: PTH116 - bytes
        except OSError:  # a missing file or a broken link, which vLLM cannot load either
            continue
        is_folder = stat.S_ISDIR(status.st_mode)
        if is_folder and name and not below:
            continue
        yield name, status, (own.st_mtime, own.st_ctime, status.st_mtime, status.st_ctime)
        if is_folder and (status.st_dev, status.st_ino) not in folders:
            folders.add((status.st_dev, status.st_ino))
            try:
                inside = os.listdir(path)  # noqa: PTH208 - bytes
            except OSError:
                if not name:
                    raise
                continue  # for example, lost+found, which vLLM cannot read either
            todo += [os.path.join(name, each) for each in inside if not each.startswith(b".")]  # noqa: PTH118


def _links_to(path: str) -> Iterator[float]:
    """Resolve ``path``. Yield the times of all symbolic links, and of directories that may have
    been renamed.
    """
    todo, seen = [path], {path}
    while todo:
        place = Path(todo.pop())
        for each in (place, *place.parents):
            own = each.lstat() if os.path.lexists(each) else None
            if own is None:
                continue
            if stat.S_ISLNK(own.st_mode):
                yield max(own.st_mtime, own.st_ctime)
                # Resolve one link per iteration.
                target = os.path.abspath(each.parent / each.readlink() / place.relative_to(each))  # noqa: PTH100
                if target not in seen and len(seen) < MAX_LINKS:
                    seen.add(target)
                    todo.append(target)
            elif each != place and own.st_ctime_ns != own.st_mtime_ns:
                # A new entry changes ctime and mtime; renaming the directory changes only ctime.
                yield own.st_ctime


def _samples(path: bytes, size: int) -> Iterator[bytes]:
    """Yield samples from a file's beginning, middle and end. Ignores read errors."""
    with suppress(OSError), open(path, "rb", buffering=0, opener=_without_waiting) as file:
        for position in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
            yield os.pread(file.fileno(), _SAMPLE_BYTES, position)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def hub_commit(name: str, revision: str | None = None, cache_dir: str | None = None) -> str | None:
    """Return the commit of ``name`` in the local Hugging Face cache. Returns None if ``name`` is
    not in the cache or vLLM uses a different hub.

    If vLLM has already loaded the model, this is the loaded commit. Does not use the network.
    """
    if envs.VLLM_USE_MODELSCOPE:
        return None
    for file in ("config.json", "params.json", "adapter_config.json"):
        try:
            found = try_to_load_from_cache(name, file, cache_dir=cache_dir, revision=revision)
        except (HFValidationError, OSError, ValueError):  # for example, ``name`` is a path
            return None
        if isinstance(found, str):
            return Path(found).parent.name
    return None


def model_fields(model: Any, load: Any) -> dict[str, str | None]:
    """Return the namespace fields for the weights in a ModelConfig and a LoadConfig."""
    # With hf_config_path, the configuration's commit says nothing about the weights.
    elsewhere = getattr(model, "hf_config_path", None)
    commit = None if elsewhere else getattr(model.hf_config, "_commit_hash", None)
    commit = commit or hub_commit(
        model.model, model.revision, getattr(load, "download_dir", None) if elsewhere else None
    )
    files = look(model.model)
    load_format = str(load.load_format)
    unknown = _why_unknown(model, load_format, commit, files) if load_format != "dummy" else None
    if unknown:
        logger.warning(
            "kvloft: %s; the cache will not be reused after the engine restarts", unknown
        )
    return {
        "commit": commit,
        "weights": files.fingerprint() if files else "",
        "unknown_weights": uuid4().hex if unknown else None,
    }


def _why_unknown(
    model: Any, load_format: str, commit: str | None, files: Look | None
) -> str | None:
    """Return why the weights cannot be identified, or None if they can."""
    settings = model.hf_config.to_dict()
    others = [name for name, value in settings.items() if str(name).endswith("_model_id") and value]
    auto_map = settings.get("auto_map")
    values = auto_map.values() if isinstance(auto_map, dict) else ()
    lists = [each if isinstance(each, list | tuple) else [each] for each in values]
    code = [str(name) for names in lists for name in names]
    if getattr(model, "model_weights", None):
        return f"cannot read the weights of {model.model} in {model.model_weights}"
    if load_format not in FILE_FORMATS:
        return f"cannot identify the weights of {model.model} with load_format={load_format}"
    if others:
        return f"{model.model} loads another model ({', '.join(others)})"
    if any("--" in each and each.partition("--")[0] != model.model for each in code):
        return f"the code for {model.model} comes from another repository"
    if commit is None and files is None:
        return f"found neither files nor a commit to identify the weights of {model.model}"
    if files is not None and files.latest_s > engine_start_s():
        return f"files of {model.model} changed after the engine started"
    return None
