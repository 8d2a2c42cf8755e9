"""WorkerCore submits each step's plan to a mover and reports the results.

The connector calls `begin` with a StepPlan, then `run_loads` and `run_saves`, and then takes the
report. `run_loads` and `run_saves` are idempotent within a step, because different vLLM releases
call different hooks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvloft.seam.ids import BlockId, ReqId, Ticket
from kvloft.seam.plan import LoadResult, StepPlan, StepReport
from kvloft.seam.shape import ArenaSpec, CacheShape
from kvloft.transfer.arena_watch import ArenaRelease, ArenaWatch
from kvloft.transfer.frames import GroupFrames, Lifeline, map_frames
from kvloft.transfer.layout import PagedLayout, read_layout, without_pages
from kvloft.transfer.mover import Finished, Mover
from kvloft.transfer.movers import MakeMover, MoverSettings, choose_mover

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

ALL_BYTES = (1 << 63) - 1
"""Value reported if the entire arena is usable. It is larger than any arena."""
RELEASE_S = 0.02
"""Time to release the previous arena within a step, which suffices for small arenas."""


def _locked(
    method: Callable[Concatenate[WorkerCore, P], R],
) -> Callable[Concatenate[WorkerCore, P], R]:
    """Hold the worker's lock while ``method`` runs."""

    @wraps(method)
    def call(self: WorkerCore, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return call


class WorkerCore:
    """The worker side of one rank."""

    def __init__(
        self,
        shape: CacheShape,
        *,
        rank: int,
        settings: MoverSettings | None = None,
        make_mover: MakeMover | None = None,
    ) -> None:
        """Create the worker side. By default, the device of the KV cache determines the mover."""
        self._settings = settings or MoverSettings()
        self._shape = shape
        self._rank = rank
        self._told_usable: int | None = None
        self._shard = shape.shard_of(rank)
        self._is_writer = shape.is_writer(rank)
        self._given_make_mover = make_mover
        self._make: Callable[[Sequence[GroupFrames]], Mover] | None = None
        self._payload_bytes: list[int] = []
        self._mover: Mover | None = None
        """The mover, or None before the first plan and while all copies must fail."""
        self._could_be_made = True
        self._is_asleep = self._is_stopped = False
        self._plan = StepPlan()
        self._arena: ArenaSpec | None = None
        """The arena in the most recent plan that specified an arena. This arena may have no mover.
        """
        self._lifeline: Lifeline | None = None
        """The lifeline, which stays open while the mover can write to a server's frames."""
        self._watch: ArenaWatch | None = None
        self._release: ArenaRelease | None = None
        self._lock = threading.RLock()
        """Each method holds this lock, because the watch thread can release the arena at any time.
        """
        self._loads_run = self._saves_run = True
        self._pending = Finished()
        self._num_announced = 0
        self._lost: set[int] = set()
        """IDs of loads whose plans have lost blocks."""
        self.failed_loads: set[ReqId] = set()
        """Requests with an incomplete load in the last result of `take_finished_loads`."""
        self._totals = Finished()

    def register(
        self, groups: Sequence[Mapping[str, Any]], num_blocks: int, fingerprint: str
    ) -> PagedLayout:
        """Read the layouts of the KV cache groups. Return the first layout that has pages.

        If a pipeline stage has no layers in a group, the stage's shards of the group's frames
        contain only a trailer. Raises LayoutError if a layout is unsupported, and UnsupportedError
        if the GPU is unsupported.
        """
        self.shutdown()
        self._could_be_made, self._is_asleep = True, False
        some = next(filter(None, groups), {})
        first = read_layout(some, num_blocks, fingerprint)
        layouts = [
            read_layout(group, num_blocks, fingerprint) if group else without_pages(first)
            for group in groups
        ]
        kept, given = [group.kept_blocks for group in self._shape.groups], self._given_make_mover
        choose = partial(choose_mover, layouts, kept, self._settings)
        self._make = partial(given, layouts) if given else choose()
        sizes = zip(layouts, kept, strict=True)
        self._payload_bytes = [layout.block_bytes * num_blocks for layout, num_blocks in sizes]
        return first

    @_locked
    def begin(self, plan: StepPlan) -> None:
        """Begin a step before its forward pass. Saves from the previous plan that never started are
        reported as failed.
        """
        if not self._saves_run:
            self._fail_saves()
        self._plan = plan
        self._loads_run = self._saves_run = False
        if plan.arena is not None and plan.arena != self._arena:
            self._enter_arena(plan.arena)
        if self._mover is not None or (plan.arena is not None and self._make is not None):
            mover = self._ready_mover()
            if mover is not None:
                if plan.sibling_blocks:
                    mover.wait_for_saves(plan.sibling_blocks)
                mover.begin_step(plan.rewritten, has_loads=bool(plan.loads))

    def _enter_arena(self, new: ArenaSpec) -> None:
        """Wait for in-flight copies, then switch to the frames of ``new``.

        After a reconnect, ``new`` can be the same memory with a new lifeline. In this case, keep
        the mover and the registered memory.
        """
        self.drain()
        if not new.is_same_memory(self._arena) or not self._could_be_made:
            self._release_arena()
            if self._release is not None:
                self._release.wait(RELEASE_S)
            self._could_be_made, self._told_usable = True, None
        self._arena = new
        lifeline = None
        try:
            lifeline = Lifeline(*new.lifeline) if new.lifeline is not None else None
        except OSError as error:
            logger.error(
                "kvloft: this worker cannot use the server's memory; caching is disabled: %s",
                error,
            )
            self._release_arena()
            self._could_be_made = False
        self._replace_lifeline(lifeline)

    @_locked
    def _see_server_exit(self, lifeline: Lifeline) -> bool:
        """Release the arena of a server that has exited. Later copies that refer to this arena
        fail. Return False if this step's loads have not started yet but can still succeed.
        """
        if lifeline is self._lifeline:
            if self._plan.loads and not self._loads_run:
                return False
            self.drain()
            self._release_arena()
            self._could_be_made = False
        return True

    def _release_arena(self) -> None:
        """Close the mover and the lifeline in the background."""
        if self._mover is not None:
            self._release = ArenaRelease(self._mover, self._lifeline)
            self._mover = self._lifeline = None
            self._release.start()
        self._replace_lifeline(None)

    def _replace_lifeline(self, new: Lifeline | None) -> None:
        """Close the old lifeline, and watch ``new``, which the caller has opened."""
        if self._watch is not None:
            self._watch.stop()
        old, self._lifeline = self._lifeline, new
        if old is not None:
            old.close()
        self._watch = ArenaWatch(new, self._see_server_exit) if new is not None else None

    @_locked
    def run_loads(self) -> None:
        """Start this step's loads. The requests do not run until their loads finish."""
        if not self._loads_run:
            self._loads_run = True
            if plans := self._plan.loads:
                self._lost |= {plan.load_id for plan in plans if plan.lost}
                self._hand_over(lambda mover: mover.submit_loads(plans), self._fail_loads)

    @_locked
    def run_saves(self) -> None:
        """Start this step's saves after vLLM launches the forward pass that writes the blocks."""
        if not self._saves_run:
            self._saves_run = True
            if not self._is_writer:
                # Another rank writes these bytes, but a ticket stays open until all ranks have
                # reported it.
                self._pending.saved += self._tickets()
            elif plans := self._plan.saves:
                self._hand_over(lambda mover: mover.submit_saves(plans), self._fail_saves)

    @_locked
    def take_finished_loads(self) -> tuple[set[ReqId], set[BlockId]]:
        """Return the requests whose loads have finished, and the blocks that were not loaded."""
        self._collect()
        results = self._pending.loads[self._num_announced :]
        self.failed_loads = {
            result.req_id
            for result in results
            if result.failed or result.bad_keys or result.load_id in self._lost
        }
        self._lost -= {result.load_id for result in results}
        self._num_announced = len(self._pending.loads)
        bad, self._pending.bad_blocks = self._pending.bad_blocks, set()
        return {result.req_id for result in results}, bad

    @_locked
    def take_report(self) -> StepReport | None:
        """Return new results and the prompt step number, or None if there is nothing to report. The
        results exclude loads that `take_finished_loads` has not returned yet.
        """
        self._collect()
        done = self._pending
        loads = done.loads[: self._num_announced]
        usable = self._usable_bytes()
        prompt_step = self._plan.prompt_step
        if not (done.saved or done.failed or loads or usable) and prompt_step is None:
            return None
        report = StepReport(
            tuple(done.saved),
            tuple(done.failed),
            tuple(loads),
            usable,
            tuple(done.misfits),
            prompt_step,
        )
        done.saved, done.failed, done.misfits = [], [], []
        del done.loads[: self._num_announced]
        self._num_announced = 0
        return report

    def _usable_bytes(self) -> tuple[int, int] | None:
        """Return the rank and its usable arena size in bytes, or None if the size is unchanged."""
        if self._mover is None or (usable := self._mover.usable_bytes) == self._told_usable:
            return None
        self._told_usable = usable
        return self._rank, ALL_BYTES if usable is None else usable

    @_locked
    def take_totals(self) -> Finished:
        """Return the bytes copied and the time spent copying since the last call."""
        totals, self._totals = self._totals, Finished()
        return totals

    @_locked
    def drain(self) -> None:
        """Wait for in-flight copies. The results are reported as usual."""
        if self._mover is not None:
            self._note(self._mover.drain())

    @_locked
    def suspend(self) -> None:
        """Wait for in-flight copies, then fail all copies until `resume` is called. Idempotent."""
        if not self._is_asleep:
            self.drain()
            self._is_asleep = True

    @_locked
    def resume(self) -> None:
        """Allow copies again. The pages must still be at the same addresses. Idempotent."""
        self._is_asleep = False

    @_locked
    def stop(self, reason: str) -> None:
        """Wait for in-flight copies, then fail all later saves and loads."""
        if self._is_stopped:
            return
        logger.error("kvloft: this worker stopped copying KV; caching is disabled: %s", reason)
        self._is_stopped = True
        self.drain()
        self._release_arena()

    def shutdown(self) -> None:
        """Wait for in-flight copies and unmap the arena. Do not write to any frame until a later
        plan specifies an arena.
        """
        with self._lock:
            watch = self._watch
            self._release_arena()
            self._arena = None
        if self._release is not None:
            self._release.wait()
        if watch is not None:
            watch.join()

    def _is_released(self) -> bool:
        """Return False while the previous mover exists, because GPU memory may be too small for two
        movers.

        Saves fail in the meantime. Loads wait, because a failed load can fail its request.
        """
        return self._release is None or self._release.wait(None if self._plan.loads else 0.0)

    def _ready_mover(self) -> Mover | None:
        """Return the mover for the current plan's arena, or None if copies must fail."""
        if self._is_asleep or self._is_stopped:
            return None
        if self._mover is None and self._could_be_made and self._is_released():
            try:
                if self._make is None or self._plan.arena is None:
                    raise RuntimeError("a plan arrived before the KV caches were registered")
                arena, sizes = self._plan.arena, self._payload_bytes
                frames = map_frames(arena, self._shape, shard=self._shard, payload_bytes=sizes)
                self._mover = self._make(frames)
            except (RuntimeError, ValueError, OSError) as error:
                logger.error("kvloft: this worker cannot copy KV; caching is disabled: %s", error)
                self._could_be_made = False
        return self._mover

    def _hand_over(self, submit: Callable[[Mover], None], fail: Callable[[], None]) -> None:
        """Submit copies. If this fails, wait for the copies that were accepted and call ``fail`` to
        report the others as failed.
        """
        mover: Mover | None = None
        is_taken = False
        try:
            mover = self._ready_mover()
            if mover is not None:
                submit(mover)
                is_taken = True
        finally:  # a panic in Rust is not an Exception
            if not is_taken:
                if mover is not None:
                    self._note(mover.drain())
                fail()

    def _fail_loads(self) -> None:
        """Report loads as failed if they were not accepted, so that their requests do not hang."""
        done = {result.load_id for result in self._pending.loads}
        plans = [plan for plan in self._plan.loads if plan.load_id not in done]
        results = [LoadResult(plan.req_id, plan.load_id, failed=True) for plan in plans]
        self._note(
            Finished(loads=results, bad_blocks={block for plan in plans for block in plan.blocks()})
        )

    def _fail_saves(self) -> None:
        """Report saves as failed if they were not accepted, so that their frames are released."""
        done = {*self._pending.saved, *self._pending.failed}
        self._note(Finished(failed=[ticket for ticket in self._tickets() if ticket not in done]))

    def _tickets(self) -> list[Ticket]:
        return [ticket for plan in self._plan.saves for ticket in plan.chunks.tickets()]

    def _collect(self) -> None:
        if self._mover is not None:
            self._note(self._mover.poll())

    def _note(self, done: Finished) -> None:
        pending, totals = self._pending, self._totals
        pending.saved += done.saved
        pending.failed += done.failed
        pending.misfits += done.misfits
        pending.loads += done.loads
        pending.bad_blocks |= done.bad_blocks
        totals.num_bytes_saved += done.num_bytes_saved
        totals.num_bytes_loaded += done.num_bytes_loaded
        totals.seconds_saving += done.seconds_saving
        totals.seconds_loading += done.seconds_loading
