"""Symbolic paged KV: an engine's block pool and workers. Every KV entry identifies its inputs.

The symbol at a position is derived from all earlier symbols that the forward pass *read*, the
position's content, and the weights' version. A wrong, stale or missing block therefore changes
every later symbol and token. This module does not depend on kvloft's plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from plan_store import ModelStore

from kvloft.seam.ids import Ticket
from kvloft.seam.plan import LoadPlan, LoadResult, SavePlan, StepPlan, StepReport

NUM_TOKEN_IDS = 3
POISON = -1


class Symbols:
    """Interns symbols, so that equal numbers imply equal histories."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def intern(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def after(
        self, root: Any, read: Sequence[int], contents: Sequence[Any], weights: int
    ) -> list[int]:
        """Return the symbols of the positions ``contents``, which follow the symbols ``read``."""
        history = self.intern(root)
        for symbol in read:
            history = self.intern((history, symbol))
        made: list[int] = []
        for content in contents:
            made.append(self.intern((history, content, weights)))
            history = self.intern((history, made[-1]))
        return made

    @staticmethod
    def sample(symbol: int) -> int:
        """Decode greedily. The next token is a function of the symbol at the last position."""
        return (symbol * 7 + symbol // 5) % NUM_TOKEN_IDS


class BlockPool:
    """vLLM's block pool: reference counts, a free queue, and full blocks that can be hits until
    they are reused.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.free = list(range(1, num_blocks))  # block 0 is the null block
        self._block_of: dict[Any, int] = {}
        self._name_of: dict[int, Any] = {}

    def find(self, name: Any) -> int | None:
        return self._block_of.get(name)

    def touch(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self.refs[block] == 0:
                self.free.remove(block)
            self.refs[block] += 1

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count
        for block in taken:
            self.refs[block] = 1
            name = self._name_of.pop(block, None)
            if name is not None and self._block_of.get(name) == block:
                del self._block_of[name]
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            assert self.refs[block] >= 0
            if self.refs[block] == 0:
                self.free.append(block)

    def publish(self, name: Any, block: int) -> None:
        if block not in self._name_of and name not in self._block_of:
            self._block_of[name] = block
            self._name_of[block] = name

    def reset(self) -> bool:
        if len(self.free) != self.num_blocks - 1:
            return False
        self._block_of.clear()
        self._name_of.clear()
        return True


@dataclass
class Work:
    """The part of a step that belongs to one request, as the worker receives it.

    ``fresh`` contains the contents of the request if the request is new to the worker.
    """

    req_id: str
    root: Any
    num_computed: int
    num_scheduled: int
    num_drafts: int
    table: tuple[int, ...]
    fresh: list[Any] | None
    sampled: list[int] = field(default_factory=list)


@dataclass
class InFlight:
    """A copy that a rank has started but not yet reported."""

    copy: Any
    payload: list[int] | None
    load: LoadPlan | None
    fails: bool = False


class Rank:
    """A worker with its shard of paged KV and its copies in flight."""

    def __init__(self, number: int, num_blocks: int, block_tokens: int) -> None:
        self.number = number
        self.block_tokens = block_tokens
        self.pages = [[POISON] * block_tokens for _ in range(num_blocks)]
        self.in_flight: list[InFlight] = []

    def read(self, table: Sequence[int], count: int) -> list[int]:
        return [
            self.pages[table[p // self.block_tokens]][p % self.block_tokens] for p in range(count)
        ]

    def write(self, table: Sequence[int], start: int, symbols: Sequence[int]) -> None:
        for at, symbol in enumerate(symbols, start=start):
            self.pages[table[at // self.block_tokens]][at % self.block_tokens] = symbol


class Workers:
    """All ranks of an engine.

    The ranks step together, but each rank completes its copies independently.
    """

    def __init__(
        self, store: ModelStore, *, num_ranks: int, num_blocks: int, block_tokens: int
    ) -> None:
        self.store = store
        self.symbols = Symbols()
        self.weights = 0
        self.ranks = [Rank(i, num_blocks, block_tokens) for i in range(num_ranks)]
        self.corrupt: set[bytes] = set()
        """Keys of chunks that fail verification in the next load."""
        self.broken = False
        """True if no mover could be created: all saves and loads fail, but no frame is damaged."""
        self._contents: dict[str, list[Any]] = {}
        self._computed: dict[str, int] = {}

    def forward(self, works: Sequence[Work], rng: Random) -> None:
        for work in works:
            if work.fresh is not None:
                self._contents[work.req_id] = list(work.fresh)
                self._computed[work.req_id] = work.num_computed
            self._forward_one(work, rng)

    def _forward_one(self, work: Work, rng: Random) -> None:
        """Compute confirmed tokens, then draft tokens.

        Draft tokens that greedy decoding would have chosen are accepted.
        """
        contents, start = self._contents[work.req_id], self._computed[work.req_id]
        assert start <= work.num_computed, "the scheduler can only be ahead of the worker"
        num_real = work.num_scheduled - work.num_drafts
        inputs = contents[start : start + num_real]
        assert len(inputs) == num_real, "scheduled more tokens than the request has"
        samples = start + num_real == len(contents)
        assert samples or not work.num_drafts
        read = self.ranks[0].read(work.table, start)
        made = self.symbols.after(work.root, read, inputs, self.weights)
        for _ in range(work.num_drafts):
            honest = self.symbols.sample(made[-1])
            inputs.append(("token", honest if rng.random() < 0.6 else (honest + 1) % NUM_TOKEN_IDS))
            made = self.symbols.after(work.root, read, inputs, self.weights)
        for rank in self.ranks:
            assert rank.read(work.table, start) == read, "the ranks' KV differs"
            rank.write(work.table, start, made)
        self._computed[work.req_id] = start + num_real
        if samples:
            for i in range(num_real - 1, work.num_scheduled):
                work.sampled.append(self.symbols.sample(made[i]))
                if i + 1 < work.num_scheduled and inputs[i + 1] != ("token", work.sampled[-1]):
                    break
            contents += [("token", token) for token in work.sampled]
            self._computed[work.req_id] += len(work.sampled) - 1

    def begin_copies(self, plan: StepPlan, rng: Random, failure_rate: float) -> None:
        """Begin the copies of a plan. Saves capture the blocks' content immediately after the
        forward pass, and loads run later.
        """
        for rank in self.ranks:
            for load in plan.loads:
                rank.in_flight.append(InFlight(None, None, load))
            for save in plan.saves:
                for copy in save.chunks:
                    payload = [symbol for block in copy.blocks for symbol in rank.pages[block]]
                    rank.in_flight.append(
                        InFlight(copy, payload, None, self.broken or rng.random() < failure_rate)
                    )

    def finish_copies(
        self, num_items: Sequence[int]
    ) -> tuple[list[StepReport], list[str], set[int]]:
        """Let rank i complete up to ``num_items[i]`` copies.

        Returns the reports, the ids of requests whose loads completed, and the blocks that were not
        loaded.
        """
        reports: list[StepReport] = []
        loaded: list[str] = []
        bad: set[int] = set()
        for rank, count in zip(self.ranks, num_items, strict=True):
            done, rank.in_flight = rank.in_flight[:count], rank.in_flight[count:]
            saved: list[Ticket] = []
            failed: list[Ticket] = []
            loads: list[LoadResult] = []
            for item in done:
                if item.load is not None:
                    result, lost = self._scatter(rank, item.load)
                    loads.append(result)
                    bad |= lost
                    loaded.append(item.load.req_id)
                else:
                    (failed if item.fails else saved).append(self._write_frame(rank, item))
            if done:
                reports.append(StepReport(tuple(saved), tuple(failed), tuple(loads)))
        return reports, loaded, bad

    def _write_frame(self, rank: Rank, item: InFlight) -> Ticket:
        copy = item.copy
        entry = self.store.tickets.get(copy.ticket)
        assert entry is not None, "I4: a worker writes a frame that is no longer reserved"
        assert (entry.frame, entry.key) == (copy.frame, copy.key)
        parts = self.store.arena.get(copy.frame)
        if parts is None:
            parts = self.store.arena[copy.frame] = {}
        parts[rank.number] = (copy.key, [POISON] if item.fails else item.payload)
        return copy.ticket

    def _scatter(self, rank: Rank, load: LoadPlan) -> tuple[LoadResult, set[int]]:
        bad: list[tuple[Any, str]] = []
        lost = set(load.lost)
        if self.broken:
            lost |= {block for copy in load.chunks for block in copy.blocks}
            return LoadResult(load.req_id, load.load_id, failed=True), lost
        for copy in load.chunks:
            pinned = [row[0] for lease in self.store.open_leases for row in lease.rows()]
            assert copy.frame in pinned, "I4: a worker reads a frame that is not pinned"
            key, payload = self.store.arena[copy.frame][rank.number]
            if key != copy.key or copy.key in self.corrupt:
                bad.append((copy.key, "tag"))
                lost |= set(copy.blocks)
                continue
            assert len(payload) == copy.num_blocks * rank.block_tokens
            for i, block in enumerate(copy.blocks, start=copy.first_block):
                rank.pages[block] = list(
                    payload[i * rank.block_tokens : (i + 1) * rank.block_tokens]
                )
        return LoadResult(load.req_id, load.load_id, tuple(bad)), lost

    def expected(self, prefix: Sequence[Any]) -> list[int]:
        """Return the symbols that the KV of ``prefix`` (root first) must have."""
        return self.symbols.after(prefix[0], [], prefix[1:], self.weights)


def chunks_of(plans: Sequence[SavePlan]) -> list[Any]:
    return [copy for plan in plans for copy in plan.chunks]
