"""Logs the store's events and any problems that its counters reveal, and describes its tiers."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from kvloft.config.table import Config
from kvloft.config.units import size_text
from kvloft.plan.breaker import MAX_FAILED_LOADS
from kvloft.seam.shape import CacheShape

logger = logging.getLogger("vllm.kvloft")

WARN_EVERY_S = 60.0
DAMAGE = (
    "kvloft: %s on disk failed verification (namespace %s), causing cache misses. Check the disk "
    "for errors, or stop the engine and run `kvloft verify`"
)
NO_ROOM = (
    "kvloft: no recent disk write succeeded (%s lost, namespace %s); continuing with host memory "
    "only. disk_path may be full, read-only, hung, or in use by another process; see the other "
    "disk log lines, or the server's log"
)
OTHER_LAYOUT = (
    "kvloft: cannot load %s saved by an engine with a different memory layout (namespace %s). "
    "Give each engine its own namespace, and report the settings that differ between the engines"
)
SLOW_DISK = (
    "kvloft: recomputed %s because reading the KV from disk was expected to take longer "
    "(namespace %s); see the metric disk_slow_tokens"
)
MISFITS = (
    "kvloft: skipped saving %s: too large for compressed frames (namespace %s); the next save uses "
    "full-size frames. See the metric save_misfit_chunks"
)
LOADS_FAIL = (
    f"kvloft: {MAX_FAILED_LOADS} consecutive loads failed; pausing loads and saves %s "
    "(namespace %s). In the meantime, vLLM computes prompts instead of loading them. See the "
    "worker logs for the cause"
)
LOADS_FAIL_REQUESTS = (
    "kvloft: a failed load fails its request; to recompute the tokens instead, set "
    '"kv_load_failure_policy": "recompute" in --kv-transfer-config (under MultiConnector, in '
    "MultiConnector's own configuration)"
)
POLL_EVERY_S: Final = 1.0


class StoreLog:
    """Logs an engine's store events and problems."""

    def __init__(self, store: Any, namespace: bytes) -> None:
        self._store, self._namespace = store, namespace.hex()[:16]
        self._next_warning_s: dict[str, float] = {}
        self._last_event = ""
        self._pause_text = "for a minute"
        """Text that says how long loads are paused after too many failures."""

    def warn_of_failing_requests(self) -> None:
        """Warn that a failed load makes its request fail, and log later pauses as permanent."""
        self._pause_text = "until the engine restarts"
        logger.warning(LOADS_FAIL_REQUESTS)

    def log_events(self) -> None:
        """Log the store's events since the last call: problems as WARNING, recoveries as INFO.

        Skips consecutive duplicates, because many operations can hang and recover in succession.
        """
        for event, is_problem in self._store.take_events():
            if event != self._last_event:
                level = logging.WARNING if is_problem else logging.INFO
                logger.log(level, "kvloft: %s (namespace %s)", event, self._namespace)
            self._last_event = event

    def warn(self, counts: Counter[str]) -> None:
        """Log the problems that an interval's counts reveal."""
        self._warn(counts["disk_verify_failures"], DAMAGE)
        self._warn(counts["layout_mismatches"], OTHER_LAYOUT)
        self._warn(counts["disk_slow_tokens"], SLOW_DISK, unit="token", level=logging.INFO)
        self._warn(counts["save_misfit_chunks"], MISFITS, level=logging.INFO)
        num_unwritten = counts["disk_dropped"] + counts["disk_write_errors"]
        self._warn(0 if counts["disk_bytes_written"] else num_unwritten, NO_ROOM)
        if counts["load_breaker_trips"]:
            logger.error(LOADS_FAIL, self._pause_text, self._namespace)

    def _warn(
        self, num: int, text: str, *, unit: str = "chunk", level: int = logging.WARNING
    ) -> None:
        """Log a problem at most once every `WARN_EVERY_S` seconds. The metrics count every
        occurrence.
        """
        if num and time.monotonic() >= self._next_warning_s.get(text, 0.0):
            self._next_warning_s[text] = time.monotonic() + WARN_EVERY_S
            logger.log(level, text, f"{num} {unit}{'s' if num != 1 else ''}", self._namespace)


class EventPoller:
    """A thread that calls ``log_events`` every second until `close` is called.

    vLLM calls no hooks while an engine is idle, but the state of the server connection can still
    change.
    """

    def __init__(self, log_events: Callable[[], None], *, every_s: float = POLL_EVERY_S) -> None:
        self._log_events, self._every_s, self._is_over = log_events, every_s, threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvloft-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. Once this method returns, ``log_events`` is no longer called.
        Idempotent.
        """
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._every_s):
            self._log_events()


def tiers_text(
    config: Config,
    shape: CacheShape,
    *,
    disk_path: str | None,
    size_bytes: int,
    num_found: int | None,
) -> str:
    """Return the description of chunks and tiers for the first log line.

    ``num_found`` is the number of chunks found in ``disk_path``, or None if the disk tier is not
    open yet.
    """
    counts = sorted({group.blocks_per_unit for group in shape.groups})
    blocks = _count(counts[0], "block")
    if len(counts) > 1:
        blocks = f"{counts[0]} to {counts[-1]} blocks"
    sizes = " and ".join(map(size_text, shape.frame_sizes))
    chunk = f"{_count(shape.unit_tokens, 'token')} ({blocks}, {sizes})"
    if config.server is not None:
        return f"chunks of {chunk}, server {config.socket} with {size_text(size_bytes)}"
    host = f"host {size_text(config.host_size)}"
    disk = "no disk"
    if disk_path:
        found = (
            "(not open yet)" if num_found is None else f"with {_count(num_found, 'chunk')} found"
        )
        disk = f"disk {disk_path} up to {size_text(config.disk_size)} {found}"
    return f"chunks of {chunk}, {host}, {disk}, eviction {config.eviction}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
