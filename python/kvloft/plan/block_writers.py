"""For which prefix each GPU block was computed or loaded. Blocks of a hit are saved only if that
prefix is the request's own.

A wrong hit of vLLM's prefix cache (vLLM #49377, #49449) costs one answer; saved, its KV would
outlive the engine. With a draft model, a hit can be right for the model and still hold the draft
model's KV for another next token in its last position. Must not depend on vLLM.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import itemgetter

from kvloft.plan.request_state import RequestState
from kvloft.seam.ids import BlockId, ReqId
from kvloft.seam.plan import SavePlan
from kvloft.seam.store import KeyChain
from kvloft.seam.views import StepView


class BlockWriters:
    """The prefix that each block was last written for.

    ``sees_grants``: `drop_given` sees every block that requests get, so each record is valid.
    """

    def __init__(self, unit_tokens: int, *, sees_grants: bool, lookahead: int = 0) -> None:
        self._unit_tokens, self._sees_grants = unit_tokens, sees_grants
        self._prefixes: dict[BlockId, bytes] = {}
        """Keys without a lookahead: the prefix to the block's end."""
        self._keys: dict[BlockId, bytes] = {} if lookahead else self._prefixes
        """Keys of the chunks, which also cover the next tokens; none if these are unknown."""
        self._records = (self._prefixes, self._keys) if lookahead else (self._prefixes,)

    # -- records --------------------------------------------------------------------------------

    def record(self, request: RequestState) -> None:
        """Record what the request wrote, if its KV is to be saved; otherwise drop it."""
        if request.is_hit_unchecked:
            self.drop_written(request)
            return
        if not (request.save_blocked or request.kv_outdated):
            request.extend_chains(request.num_complete * self._unit_tokens)
        if request.save_blocked or request.kv_outdated:  # also if its tokens show a new turn
            self.forget(request)
        else:
            self.note(request)

    def note(self, request: RequestState) -> None:
        """Record the complete units of the request, except those that vLLM had, and drop the rest.

        vLLM caches a block before the tokens that follow it are known, and another request may
        hit it although they never are: its request was aborted.
        """
        self._drop_unknown(request)
        first = max(request.num_local_blocks, request.num_noted)
        units = range(first, request.num_complete)
        _update(self._prefixes, request, units, request.prefix_chain)
        if self._keys is not self._prefixes:
            units = range(first, min(request.num_complete, request.chain.num_blocks))
            _update(self._keys, request, units, request.chain)
        request.num_noted = max(request.num_noted, units.stop)

    def forget(self, request: RequestState) -> None:
        """Drop the blocks that a request writes whose KV is not to be saved."""
        self._drop_unknown(request)
        request.num_noted = max(request.num_noted, len(request.blocks))

    def drop_written(self, request: RequestState) -> None:
        """Drop every block that the request wrote: it may have computed on a wrong hit."""
        request.num_noted = 0
        self._drop_unknown(request)

    def drop(self, blocks: Iterable[BlockId]) -> None:
        """Drop blocks that a request will write to."""
        if self._prefixes:
            blocks = list(blocks)
            for records in self._records:
                for block in blocks:
                    records.pop(block, None)

    def drop_given(
        self,
        step: StepView,
        requests: Mapping[ReqId, RequestState],
        admitted: Iterable[ReqId],
    ) -> None:
        """Drop the blocks that this step, or an admission before it, gave to requests."""
        if not (self._sees_grants and self._prefixes):
            return
        for request in filter(None, map(requests.get, admitted)):
            self.drop(request.blocks[request.num_local_blocks :])
        for new in step.new:
            if new.req_id not in requests:
                self.drop(new.block_ids)
        self.drop(chain.from_iterable(map(itemgetter(1), step.grown)))

    def clear(self) -> None:
        """Drop all blocks."""
        for records in self._records:
            records.clear()

    def _drop_unknown(self, request: RequestState) -> None:
        for table, size in _tables(request):
            self.drop(table[max(request.num_local_blocks, request.num_noted) * size :])

    # -- checks ---------------------------------------------------------------------------------

    def check_hits(
        self,
        due: Iterable[RequestState],
        requests: Mapping[ReqId, RequestState],
        admitted: Collection[ReqId],
        step: StepView,
    ) -> list[RequestState]:
        """Check the hits of requests that are ``due`` or ``admitted``, each once.

        Returns those for which vLLM had a block of another prefix: all that they compute depends on
        it, so nothing of them may be saved.
        """
        unchecked = {request: None for request in due if request.is_hit_unchecked}
        for request in filter(None, map(requests.get, admitted)):
            if request.is_hit_unchecked:
                unchecked[request] = None
        if not unchecked:
            return []
        # A reset outside a step preempts a request whose table is outdated until its admission.
        scheduled = step.num_scheduled_tokens
        writers = [
            request
            for request in requests.values()
            if request.req_id in scheduled or request.live.num_computed_tokens > 0
        ]
        return self.find_strange(unchecked, writers)

    def find_strange(
        self, unchecked: Iterable[RequestState], writers: Sequence[RequestState]
    ) -> list[RequestState]:
        """Check the hits of ``unchecked`` requests and return those with a block of another prefix.

        ``writers`` may have filled blocks since they were recorded.
        """
        left = list(unchecked)
        for request in left:
            request.extend_chains(request.num_local_blocks * self._unit_tokens)
        if self._sees_grants:
            left = self._without_known(left)
        num_before = None
        while left and len(left) != num_before:  # some hit blocks that others fill in this step
            num_before = len(left)
            for writer in writers:
                if writer.blocks and not writer.is_hit_unchecked:
                    self.record(writer)
            left = self._without_known(left)
        for request in left:
            request.is_hit_unchecked = False
            self.drop_written(request)
        return left

    def _without_known(self, unchecked: list[RequestState]) -> list[RequestState]:
        """Mark the requests as checked whose hits are known, and return the others."""
        known = [request for request in unchecked if self.know_hit(request)]
        for request in known:
            request.is_hit_unchecked = False
        return [request for request in unchecked if request.is_hit_unchecked]

    def know_hit(self, request: RequestState) -> bool:
        """Return True if all blocks that vLLM had for the request were written for its prefix.

        A block of another next token also counts: `are_its_own` prevents that it is saved under
        this request's key.
        """
        table, size = request.blocks.main_table, request.blocks.main_size
        num_units = request.num_local_blocks
        written = list(map(self._prefixes.get, table[: num_units * size]))
        keys = map(request.prefix_chain.key, range(num_units))
        return written == [key for key in keys for _ in repeat(None, size)]

    def find_others(
        self, saves: Iterable[SavePlan], requests: Mapping[ReqId, RequestState]
    ) -> list[SavePlan]:
        """Return saves with blocks that vLLM had and that another continuation wrote, and block
        further saves of their requests.
        """
        found = []
        for save in saves:
            request = requests[save.req_id]
            if not request.num_local_blocks or self.are_of_continuation(
                request, save.chunks.block_ids()
            ):
                continue
            found.append(save)
        for save in found:
            requests[save.req_id].save_blocked = True
        return found

    def are_of_continuation(self, request: RequestState, blocks: Sequence[BlockId]) -> bool:
        """Return True if ``blocks`` from vLLM's own cache were written for this continuation."""
        wanted = set(blocks)
        for table, size in _tables(request):
            local = enumerate(table[: request.num_local_blocks * size])
            keys = (
                (block, request.chain.key(nth // size)) for nth, block in local if block in wanted
            )
            if any(self._keys.get(block) != key for block, key in keys):
                return False
        return True


def _update(
    records: dict[BlockId, bytes], request: RequestState, units: range, chain: KeyChain
) -> None:
    """Record the keys of the request's ``units`` for their blocks in all groups."""
    keys = list(map(chain.key, units))
    for table, size in _tables(request) if keys else ():
        for nth in range(size):
            blocks = table[units.start * size + nth : units.stop * size : size]
            records.update(zip(blocks, keys, strict=False))


def _tables(request: RequestState) -> Iterator[tuple[Sequence[BlockId], int]]:
    """Yield each group's table, and how many of its blocks share a key."""
    blocks = request.blocks
    return ((table, blocks.size_of(group)) for group, table in enumerate(blocks.tables))
