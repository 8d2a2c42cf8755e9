"""Records which prefix each GPU block was computed or loaded for.

A request can hit blocks in vLLM's prefix cache that were written for a different prefix
(vLLM #49377, #49449). Such a hit corrupts the request's output, and saving the KV would make the
error permanent. A hit's blocks are therefore saved only if they were written for the request's
prefix. With a draft model, a hit can be correct for the target model although the draft model's KV
at the last position depends on a different next token.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from kvloft.plan.request_state import RequestState
from kvloft.seam.ids import BlockId, ReqId
from kvloft.seam.plan import SavePlan
from kvloft.seam.store import KeyChain
from kvloft.seam.views import StepView


class BlockWriters:
    """Maps each block to the prefix that it was last written for.

    `drop_given` drops the record of every block that vLLM assigns, so all remaining records are
    valid. Without ``all_groups``, only full-attention blocks are recorded and checked: vLLM keeps
    them until the request ends, but the tables of other groups can be outdated.
    """

    def __init__(self, unit_tokens: int, *, all_groups: bool = True, lookahead: int = 0) -> None:
        self._unit_tokens, self._all_groups = unit_tokens, all_groups
        self._prefixes: dict[BlockId, bytes] = {}
        """Keys without lookahead, which depend only on tokens up to the end of the block."""
        self._keys: dict[BlockId, bytes] = {} if lookahead else self._prefixes
        """Chunk keys, which also depend on the lookahead tokens. A block has no key while its
        lookahead tokens are unknown.
        """
        self._records = (self._prefixes, self._keys) if lookahead else (self._prefixes,)

    # -- records --------------------------------------------------------------------------------

    def record(self, request: RequestState) -> None:
        """Record the blocks that the request wrote, or drop their records if its KV must not be
        saved.
        """
        if request.is_hit_unchecked:
            self.drop_written(request)
            return
        if not (request.save_blocked or request.kv_outdated):
            request.extend_chains(request.num_complete * self._unit_tokens)
        if request.save_blocked or request.kv_outdated:  # `extend_chains` can set ``kv_outdated``
            self.forget(request)
        else:
            self.note(request)

    def note(self, request: RequestState) -> None:
        """Record the request's complete units that were not in vLLM's cache, and drop the records
        of all later blocks.

        vLLM caches a block before its next tokens are known. After an abort, these tokens stay
        unknown, but other requests can still hit the block.
        """
        self._drop_unknown(request)
        first = max(request.num_local_units, request.num_noted)
        units = range(first, request.num_complete)
        self._update(self._prefixes, request, units, request.prefix_chain)
        if self._keys is not self._prefixes:
            units = range(first, min(request.num_complete, request.chain.num_blocks))
            self._update(self._keys, request, units, request.chain)
        request.num_noted = max(request.num_noted, units.stop)

    def forget(self, request: RequestState) -> None:
        """Drop the records of blocks that a request writes, because its KV must not be saved."""
        self._drop_unknown(request)
        request.num_noted = max(request.num_noted, len(request.blocks))

    def drop_written(self, request: RequestState) -> None:
        """Drop the records of all blocks that the request wrote, because its hit may be wrong."""
        request.num_noted = 0
        self._drop_unknown(request)

    def drop(self, blocks: Iterable[BlockId]) -> None:
        """Drop the records of ``blocks``, which are about to be overwritten."""
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
        """Drop the records of blocks that vLLM assigned in this step or at admission."""
        if not self._prefixes:
            return
        for request in filter(None, map(requests.get, admitted)):
            for group, table in enumerate(request.blocks.tables):
                self.drop(table[request.num_local_units * request.blocks.size_of(group) :])
        rows = [*step.grown, *((new.req_id, new.block_ids) for new in step.new)]
        handled = {new.req_id for new in step.new} & requests.keys()
        self.drop(chain.from_iterable(blocks for req_id, blocks in rows if req_id not in handled))

    def clear(self) -> None:
        for records in self._records:
            records.clear()

    def _drop_unknown(self, request: RequestState) -> None:
        for table, size in self._tables(request):
            self.drop(table[max(request.num_local_units, request.num_noted) * size :])

    # -- checks ---------------------------------------------------------------------------------

    def check_hits(
        self,
        due: Iterable[RequestState],
        requests: Mapping[ReqId, RequestState],
        admitted: Collection[ReqId],
        step: StepView,
    ) -> list[RequestState]:
        """Check all hits of ``due`` and ``admitted`` requests that have not been checked yet.

        Returns the requests whose hit contains a block of a different prefix. All KV that such a
        request computes depends on that block, so none of the KV may be saved.
        """
        unchecked = {request: None for request in due if request.is_hit_unchecked}
        for request in filter(None, map(requests.get, admitted)):
            if request.is_hit_unchecked:
                unchecked[request] = None
        if not unchecked:
            return []
        # A reset between steps preempts requests. Their tables are outdated until the next
        # admission.
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
        """Return the ``unchecked`` requests whose hit contains a block of a different prefix.

        ``writers`` are the requests that may have written unrecorded blocks.
        """
        left = list(unchecked)
        for request in left:
            request.extend_chains(request.num_local_units * self._unit_tokens)
        left = self._without_known(left)
        num_before = None
        # A request can hit blocks that another unchecked request fills in this step.
        while left and len(left) != num_before:
            num_before = len(left)
            for writer in writers:
                if writer.blocks.has_blocks and not writer.is_hit_unchecked:
                    self.record(writer)
            left = self._without_known(left)
        for request in left:
            request.is_hit_unchecked = False
            self.drop_written(request)
        return left

    def _without_known(self, unchecked: list[RequestState]) -> list[RequestState]:
        """Mark and record the requests for which `know_hit` returns True. Return the others."""
        known = [request for request in unchecked if self.know_hit(request)]
        for request in known:
            request.is_hit_unchecked = False
            self.record(request)  # its blocks can be freed before its next examination
        return [request for request in unchecked if request.is_hit_unchecked]

    def know_hit(self, request: RequestState) -> bool:
        """Return True if each unit's last block in the hit was written for the request's prefix.

        Earlier blocks of a unit are not checked, because prefixes that differ only later in the
        unit share them. In the main group, every last block must have a record, except the null
        blocks before a window. A block of another group may lack a record.

        The writer's next token may still differ. `are_of_continuation` keeps such blocks from being
        saved under this request's key.
        """
        keys = list(map(request.prefix_chain.key, range(request.num_local_units)))
        for table, size in self._tables(request):
            blocks = table[size - 1 : len(keys) * size : size]
            written = list(map(self._prefixes.get, blocks))
            if written == keys:
                continue
            allowed = () if table is request.blocks.main_table else (None,)
            if len(written) < len(keys) and not allowed:
                return False
            for block, found, key in zip(blocks, written, keys, strict=False):
                if block and found != key and found not in allowed:
                    return False
        return True

    def find_others(
        self, saves: Iterable[SavePlan], requests: Mapping[ReqId, RequestState]
    ) -> list[SavePlan]:
        """Return the saves that contain hit blocks written for a different continuation."""
        found = []
        for save in saves:
            request = requests[save.req_id]
            if not request.num_local_units or self.are_of_continuation(
                request, save.chunks.block_ids()
            ):
                continue
            found.append(save)
        return found

    def are_of_continuation(self, request: RequestState, blocks: Sequence[BlockId]) -> bool:
        """Return True if the hit blocks among ``blocks`` were written for the request's
        continuation.
        """
        wanted = set(blocks)
        for table, size in self._tables(request):
            local = enumerate(table[: request.num_local_units * size])
            keys = (
                (block, request.chain.key(nth // size)) for nth, block in local if block in wanted
            )
            if any(self._keys.get(block) != key for block, key in keys):
                return False
        return True

    def _update(
        self, records: dict[BlockId, bytes], request: RequestState, units: range, chain: KeyChain
    ) -> None:
        """Record each unit's key for its blocks."""
        keys = list(map(chain.key, units))
        for table, size in self._tables(request) if keys else ():
            for nth in range(size):
                blocks = table[units.start * size + nth : units.stop * size : size]
                records.update(zip(blocks, keys, strict=False))

    def _tables(self, request: RequestState) -> Iterator[tuple[Sequence[BlockId], int]]:
        """Yield the block table and the number of blocks per unit of each recorded group."""
        blocks = request.blocks
        if not self._all_groups:
            yield blocks.main_table, blocks.main_size
            return
        for group, table in enumerate(blocks.tables):
            yield table, blocks.size_of(group)
