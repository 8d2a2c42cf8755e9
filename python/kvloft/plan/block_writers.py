"""Which prefix each GPU block was computed or loaded for: blocks that vLLM had are saved only if that is the request's own.

A wrong hit of vLLM's prefix cache (vLLM #49377, #49449) costs one answer. Saved, the same KV would outlive the engine. With a
drafter a hit may be right for the model and still hold another next token's KV in its last position. It must not know vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat

from kvloft.plan.saves import SaveRow
from kvloft.plan.tracker import Tracker
from kvloft.seam.ids import BlockId, ReqId
from kvloft.seam.plan import SavePlan
from kvloft.seam.views import StepView


class BlockWriters:
    """The key of the prefix that each block was last written for.

    ``sees_grants``: `drop_given` sees all blocks that requests are given, so what is recorded always holds.
    """

    def __init__(self, block_tokens: int, *, sees_grants: bool) -> None:
        self._block_tokens, self._sees_grants = block_tokens, sees_grants
        self._keys: dict[BlockId, bytes] = {}

    def record(self, tracker: Tracker) -> None:
        """`note` or `forget`, by whether the request's KV is to be saved."""
        if tracker.is_hit_unchecked:
            self.disown(tracker)
            return
        if not (tracker.save_blocked or tracker.kv_outdated):
            tracker.extend_chain(tracker.num_complete * self._block_tokens)
        if tracker.save_blocked or tracker.kv_outdated:  # the tokens may show that a session went on
            self.forget(tracker)
        else:
            self.note(tracker)

    def note(self, tracker: Tracker) -> None:
        """Record that the request filled its complete blocks, except those that vLLM had, and writes to the rest.

        vLLM may cache one of the rest before its next token is known here.
        """
        first, num_blocks = max(tracker.num_local_blocks, tracker.num_noted), tracker.num_complete
        if first < num_blocks:
            keys = list(map(tracker.chain.key, range(first, num_blocks)))
            for table, size in _tables(tracker):
                for nth in range(size):
                    self._keys.update(zip(table[first * size + nth : num_blocks * size : size], keys, strict=False))
            tracker.num_noted = num_blocks
        self._drop_unknown(tracker)

    def forget(self, tracker: Tracker) -> None:
        """The request's KV is not to be saved: nothing is known of the blocks it writes to."""
        self._drop_unknown(tracker)
        tracker.num_noted = max(tracker.num_noted, len(tracker.blocks))

    def disown(self, tracker: Tracker) -> None:
        """Nothing is known of what the request wrote, because it is not known what it computed on."""
        tracker.num_noted = 0
        self._drop_unknown(tracker)

    def drop(self, blocks: Iterable[BlockId]) -> None:
        """These blocks were given to a request, which will write to them."""
        for block in blocks if self._keys else ():
            self._keys.pop(block, None)

    def drop_given(self, view: StepView, trackers: Mapping[ReqId, Tracker], admitted: Iterable[ReqId]) -> None:
        """Drop what is known of blocks that this step gave to requests."""
        if not self._sees_grants:
            return
        for tracker in filter(None, map(trackers.get, admitted)):
            self.drop(tracker.blocks[tracker.num_local_blocks :])
        for new in view.new:
            if new.req_id not in trackers:
                self.drop(new.block_ids)
        for _, blocks in view.grown:
            self.drop(blocks)

    def leave_out_strange_hits(
        self,
        due: tuple[list[Tracker], list[SaveRow]],
        trackers: Mapping[ReqId, Tracker],
        admitted: Iterable[ReqId],
        scheduled: Mapping[ReqId, int],
    ) -> None:
        """Save nothing of requests for which vLLM had a block of another prefix: all that they compute depends on it.

        ``due``: trackers and their rows, from which those are removed.
        """
        requests, rows = due
        candidates = (*requests, *filter(None, map(trackers.get, admitted)))
        if not (unchecked := dict.fromkeys(tracker for tracker in candidates if tracker.is_hit_unchecked)):
            return
        # A request that a reset preempted outside a step has a table that is not its own until it is admitted again.
        writers = [t for t in trackers.values() if t.req_id in scheduled or t.live.num_computed_tokens > 0]
        for tracker in self.find_strange(unchecked, writers):
            tracker.save_blocked = True
            for nth in [nth for nth, other in enumerate(requests) if other is tracker]:
                del requests[nth], rows[nth]

    def find_strange(self, unchecked: Iterable[Tracker], writers: Sequence[Tracker]) -> list[Tracker]:
        """Check the hits of ``unchecked`` requests; returns those that hit a block of another prefix.

        ``writers`` may have filled blocks since they were recorded.
        """
        left = list(unchecked)
        for tracker in left:
            tracker.extend_chain(tracker.num_local_blocks * self._block_tokens)
        is_first = self._sees_grants
        while True:
            if not is_first:
                for writer in writers:
                    if writer.blocks and not writer.is_hit_unchecked:
                        self.record(writer)
            known = [tracker for tracker in left if self.know_hit(tracker)]
            for tracker in known:
                tracker.is_hit_unchecked = False
            left = [tracker for tracker in left if tracker.is_hit_unchecked]
            if not left or not (known or is_first):
                break
            is_first = False  # some hit blocks that others fill in this step
        for tracker in left:
            tracker.is_hit_unchecked = False
            self.disown(tracker)
        return left

    def clear(self) -> None:
        """Nothing is known of any block."""
        self._keys.clear()

    def _drop_unknown(self, tracker: Tracker) -> None:
        for table, size in _tables(tracker):
            self.drop(table[max(tracker.num_local_blocks, tracker.num_noted) * size :])

    def know_hit(self, tracker: Tracker) -> bool:
        """Return True if all blocks that vLLM had for the request were written for its prefix.

        With a lookahead, another next token's block is as good: `are_its_own` keeps that from being saved under this one's key.
        """
        table, size = tracker.blocks.main_table, tracker.blocks.main_size
        num_local = tracker.num_local_blocks * size
        written = list(map(self._keys.get, table[:num_local]))
        if tracker.lookahead:
            return None not in written
        wanted = [key for key in map(tracker.chain.key, range(tracker.num_local_blocks)) for _ in repeat(None, size)]
        return written == wanted

    def find_others(self, saves: Iterable[SavePlan], trackers: Mapping[ReqId, Tracker]) -> list[SavePlan]:
        """Return the saves of blocks that vLLM had and another continuation wrote; their requests save nothing further."""
        requests = [(save, trackers[save.req_id]) for save in saves]
        found = [
            pair for pair in requests if pair[1].num_local_blocks and not self.are_its_own(pair[1], pair[0].chunks.block_ids())
        ]
        for _, tracker in found:
            tracker.save_blocked = True
        return [save for save, _ in found]

    def are_its_own(self, tracker: Tracker, blocks: Sequence[BlockId]) -> bool:
        """Return True if those of ``blocks`` that vLLM had were written for the request's own continuation."""
        wanted = set(blocks)
        for table, size in _tables(tracker):
            local = enumerate(table[: tracker.num_local_blocks * size])
            if any(self._keys.get(block) != tracker.chain.key(nth // size) for nth, block in local if block in wanted):
                return False
        return True


def _tables(tracker: Tracker) -> Iterator[tuple[Sequence[BlockId], int]]:
    """Each group's table, and how many of its blocks have one key."""
    blocks = tracker.blocks
    return ((table, blocks.size_of(group)) for group, table in enumerate(blocks.tables))
