"""The machine's records of all plans, saves, offers and reports, and the breaches that it detects.

Breaches are collected, not raised, because hooks detect them and the connector turns exceptions in
hooks into misses. The ledger uses plans and vLLM's block tables. It does not depend on how kvloft
makes plans or how a store keeps chunks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvloft.seam.batch import ChunkCopy

from .groups import Group, are_grouped, lookahead
from .symbols import Prefix

State = tuple[int, int, int]
"""A Mamba state that vLLM offers: group, block, and number of tokens."""


def copies(chunks: Any) -> Iterator[tuple[int, ChunkCopy]]:
    """Yield each chunk of a plan with its group."""
    for group, batch in chunks.by_group() if chunks else ():
        yield from ((group, copy) for copy in batch)


@dataclass
class Planned:
    """A planned save with the expected content of its frame and the ranks that reported it."""

    key: bytes
    words: list[int]
    ends: list[int]
    weights: int
    reported: set[int] = field(default_factory=set)
    has_failed: bool = False


@dataclass
class Ledger:
    """The records of all engines that use the same disk in succession."""

    num_ranks: int = 1
    groups: tuple[Group, ...] = (Group(),)
    weights: int = 0
    namespace: str = ""
    """The user's namespace, which changes with the weights."""
    num_lives: int = 1
    breaches: list[str] = field(default_factory=list)
    truth: dict[bytes, list[int]] = field(default_factory=dict)
    """The expected frame content for each key, with the current weights."""
    saved: set[int] = field(default_factory=set)
    """The symbols of prefixes whose last chunk was saved."""
    tickets: dict[int, Planned] = field(default_factory=dict)
    loads: dict[int, set[int]] = field(default_factory=dict)
    """The ranks that have reported each load."""
    asked: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    admitted: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The first token and number of tokens of each admitted load, by request."""
    before: dict[int, int] = field(default_factory=dict)
    """Maps KV in a draft model's layers to the symbol of its prefix without the next token.

    Includes the KV of earlier engines, because later engines can still load it.
    """
    why_lossy: str | None = None
    """The reason why saved chunks can be missing now, or None if no chunk may be missing."""
    doubtful: set[str] = field(default_factory=set)
    """Requests with failed loads. kvloft is not required to offer tokens to these requests."""
    standing: set[str] = field(default_factory=set)
    """Requests with a valid offer from an earlier step, which does not include later saves."""
    num_saved: int = 0
    num_offered: int = 0

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.breaches.append(otherwise)

    def lose(self, why: str) -> None:
        self.why_lossy = self.why_lossy or why

    def new_life(self, *, has_new_weights: bool) -> None:
        """Start a new engine. Tickets, loads and requests of the old engine become invalid."""
        self.num_lives += 1
        if has_new_weights:
            self.namespace += "w"
            self.new_weights()
        self.tickets.clear()
        self.loads.clear()
        self.asked.clear()
        self.admitted.clear()

    def new_weights(self) -> None:
        """Change the weights, which invalidates all stored chunks."""
        self.weights = (self.weights + 0x5DEECE66D) & ((1 << 61) - 1)
        self.truth.clear()
        self.saved.clear()

    def kv(self, symbol: int, group: int = 0) -> int:
        """Return the expected memory content of ``group`` at the position with ``symbol``."""
        return symbol ^ self.weights ^ (group * 0x9E3779B97F4A)

    @cached_property
    def _main(self) -> int:
        """Return the first full-attention group or, if there is none, the first sliding-window
        group.
        """
        kinds = [group.kind for group in self.groups]
        return kinds.index("full" if "full" in kinds else "window")

    @cached_property
    def ahead(self) -> int:
        """Number of tokens that follow a block and affect its KV."""
        return lookahead(self.groups)

    def words(self, prefix: Prefix, begin: int, end: int, number: int = 0) -> list[int]:
        """Return the content of a group's blocks for positions [begin, end), ordered by block and
        then by layer.
        """
        found, group = list[int](), self.groups[number]
        block = group.block_tokens
        for at in range(begin, end, block):
            if group.kind == "state":
                found += [self.kv(prefix.symbols[at + block - 1], number), at + block]
                continue
            for layer in group.layers:
                first = at + (layer == "draft")
                found += [
                    self.kv(symbol, number) for symbol in prefix.symbols[first : first + block]
                ]
        return found

    def ends(self, prefix: Prefix, begin: int, end: int, number: int = 0) -> list[int]:
        """Return the symbol of each block that ends in [begin, end). The symbol identifies the
        prefix up to the last token on which the block's KV depends.
        """
        block = self.groups[number].block_tokens
        return [
            self.kv(symbol, number)
            for symbol in prefix.symbols[begin + block - 1 + self.ahead : end + self.ahead : block]
        ]

    # -- plans
    # -----------------------------------------------------------------------------------------

    def check_save(
        self,
        save: Any,
        prefix: Prefix,
        tables: Sequence[Sequence[int]],
        computed: int,
        states: Iterable[State] = (),
    ) -> None:
        """Check a save.

        All blocks of a save must be complete blocks of its request (I6), and all of their tokens
        must be known and computed by the end of this step (I2, I7). ``states`` contains the states
        that vLLM offers for the request in this step. Mamba groups must not save other states.
        """
        for number, copy in copies(save.chunks):
            table, blocks, block = (
                list(tables[number]),
                list(copy.blocks),
                self.groups[number].block_tokens,
            )
            if 0 in blocks or not set(blocks) <= set(table):
                self.breaches.append(
                    f"save of blocks {blocks}, not all of {save.req_id}'s {table} (I6)"
                )
                continue
            if self.groups[number].kind == "state":
                begin = self._offered(number, blocks, states) - block
                self.expect(
                    begin >= 0,
                    f"{save.req_id}: a state is saved that vLLM does not offer: {blocks} of group "
                    f"{number} (I2)",
                )
            else:
                begin = table.index(blocks[0]) * block
                in_order = table[begin // block : begin // block + len(blocks)]
                self.expect(blocks == in_order, f"save of {blocks}, out of order in {table} (I6)")
            self._note_save(
                save.req_id,
                number,
                copy,
                prefix,
                range(max(0, begin), begin + len(blocks) * block),
                computed,
            )

    @staticmethod
    def _offered(number: int, blocks: list[int], states: Iterable[State]) -> int:
        """Return the number of tokens before the state that vLLM offers in ``blocks``, or 0 if vLLM
        offers no state.
        """
        return next(
            (
                num_tokens
                for group, block, num_tokens in states
                if (group, [block]) == (number, blocks)
            ),
            0,
        )

    def check_states(
        self, req_id: str, prefix: Prefix, states: Iterable[State], limit: int
    ) -> None:
        """Check that each state that vLLM offers in this step, up to ``limit`` tokens, is saved now
        or was saved earlier, unless chunks may be missing.
        """
        kept = self.saved | {end for planned in self.tickets.values() for end in planned.ends}
        for number, _, num_tokens in states if self.why_lossy is None else ():
            is_known = num_tokens + self.ahead <= min(
                limit + self.ahead, len(prefix)
            )  # with a draft model, the token after the state must also be known
            is_kept = (
                not is_known or self.kv(prefix.symbols[num_tokens - 1 + self.ahead], number) in kept
            )
            self.expect(
                is_kept,
                f"{req_id}: the state after {num_tokens} tokens was offered and is not saved, "
                f"group {number}",
            )

    def _note_save(
        self, req_id: str, number: int, copy: ChunkCopy, prefix: Prefix, span: range, computed: int
    ) -> None:
        begin, end = span.start, span.stop
        self.expect(
            copy.first_block == 0 and len(copy.blocks) == copy.num_blocks,
            f"save of a part of a chunk: {copy}",
        )
        self.expect(
            end + self.ahead <= len(prefix),
            f"{req_id}: {end} tokens saved, {len(prefix)} known (I7)",
        )
        self.expect(end <= computed, f"{req_id}: {end} tokens saved, {computed} computed (I2)")
        self.expect(copy.ticket not in self.tickets, f"ticket {copy.ticket} planned twice (I10)")
        if end + self.ahead > len(prefix):
            return
        words = self.words(prefix, begin, end, number)
        known = self.truth.setdefault(copy.key, words)
        self.expect(
            known == words,
            f"{req_id}: one key, two prefixes (tokens {begin} to {end} of group {number})",
        )
        self.tickets[copy.ticket] = Planned(
            copy.key, words, self.ends(prefix, begin, end, number), self.weights
        )

    def check_load(self, load: Any, prefix: Prefix, tables: Sequence[Sequence[int]]) -> None:
        """Check that a load fills exactly the allocated blocks, each with the chunk for its
        position (I1, I6).
        """
        self.expect(load.load_id not in self.loads, f"load {load.load_id} planned twice (I10)")
        self.loads[load.load_id] = set()
        begin, count = self.admitted.get(load.req_id, (0, 0))
        if load.lost:
            self.doubtful.add(load.req_id)
        for number, group in enumerate(self.groups):
            named = [b for at, copy in copies(load.chunks) for b in copy.blocks if at == number]
            first = max(begin, group.needs_from(begin + count))
            wanted = list(
                tables[number][first // group.block_tokens : (begin + count) // group.block_tokens]
            )
            # If blocks are lost and there are multiple groups, the load is skipped, and the lost
            # blocks are reported in the main group.
            if load.lost:
                is_main = number == self._main
                named, wanted = (
                    named + list(load.lost) * is_main,
                    wanted * (is_main or len(self.groups) == 1),
                )
            is_right = named == wanted and 0 not in named
            self.expect(
                is_right,
                f"{load.req_id}: load of blocks {named} where {wanted} were given for it (I6), "
                f"group {number}",
            )
        for number, copy in copies(load.chunks):
            self._check_copy(load.req_id, number, copy, prefix, tables[number])

    def _check_copy(
        self, req_id: str, number: int, copy: ChunkCopy, prefix: Prefix, table: Sequence[int]
    ) -> None:
        if copy.blocks[0] not in table or (words := self.truth.get(copy.key)) is None:
            self.breaches.append(
                f"{req_id}: load of {copy.key.hex()[:8]}, which was not saved under these weights "
                "(I1)"
            )
            return
        block = self.groups[number].block_tokens
        at = table.index(copy.blocks[0]) * block
        own = self.words(prefix, at, at + len(copy.blocks) * block, number)
        first = copy.first_block * len(own) // len(copy.blocks)
        is_own = own == words[first : first + len(own)] and bool(own)
        self.expect(
            is_own, f"{req_id}: another prefix's chunk for tokens {at} on (I1), group {number}"
        )

    # -- results
    # --------------------------------------------------------------------------------------

    def landed(self, ticket: int, words: list[int]) -> None:
        """Record that a rank has gathered a save's blocks into its frame."""
        planned = self.tickets.get(ticket)
        self.expect(planned is not None, f"a copy for ticket {ticket}, which no step planned")
        if planned is not None:
            self.expect(
                words == planned.words,
                f"ticket {ticket}: the frame does not hold its key's KV (I1, I2)",
            )

    def check_report(self, rank: int, report: Any) -> None:
        """Check that each rank reports each ticket and each load exactly once (I10)."""
        for ticket in (*report.saved, *report.failed):
            planned = self.tickets.get(ticket)
            if planned is None or rank in planned.reported:
                self.breaches.append(
                    f"rank {rank} reported ticket {ticket} again, or unasked (I10)"
                )
                continue
            planned.reported.add(rank)
            planned.has_failed |= ticket in report.failed
            if planned.has_failed:
                self.lose("a save failed")
            elif len(planned.reported) == self.num_ranks and planned.weights == self.weights:
                self.saved.update(planned.ends)
                self.num_saved += 1
        for result in report.loads:
            ranks = self.loads.get(result.load_id)
            if ranks is None or rank in ranks:
                self.breaches.append(
                    f"rank {rank} reported load {result.load_id} again, or unasked (I10)"
                )
                continue
            ranks.add(rank)
            if result.bad_keys or result.failed:
                self.doubtful.add(result.req_id)
                self.lose("a load failed")

    # -- offers
    # -----------------------------------------------------------------------------------------

    def check_offer(
        self, req_id: str, prefix: Prefix, local: int, answer: int | None, unit: int
    ) -> None:
        """Check that all offered tokens were saved. Unless chunks may be missing, also check that
        all saved tokens are offered.
        """
        self.asked[req_id] = (local, answer)
        if answer is None:
            return
        total = local + answer
        most = len(prefix) - are_grouped(
            self.groups
        )  # with multiple groups, or only windows, vLLM cannot recompute one token of a hit
        if answer:
            self.num_offered += 1
            is_possible = total <= most and answer % unit == 0
            self.expect(
                is_possible, f"{req_id}: {answer} tokens offered beyond {local} of {len(prefix)}"
            )
            has_all = all(
                self._has(number, prefix, local, total) for number in range(len(self.groups))
            )
            self.expect(
                is_possible and has_all,
                f"{req_id}: offered {total} tokens, not all of them saved (I1)",
            )
        elif req_id in self.doubtful:
            return
        if self.why_lossy is None and req_id not in self.standing:
            found = self.num_stored(prefix, min(most, len(prefix) - self.ahead), unit)
            self.expect(
                total >= found,
                f"{req_id}: {found} tokens are stored, only {total} offered (local: {local})",
            )

    def _has(self, number: int, prefix: Prefix, begin: int, end: int) -> bool:
        """Return True if a group has saved all chunks, starting at ``begin``, that a hit of ``end``
        tokens needs.
        """
        block = self.groups[number].block_tokens
        begin = max(begin, self.groups[number].needs_from(end) // block * block)
        ends = self.ends(prefix, begin, end, number)
        return len(ends) == max(0, end - begin) // block and self.saved.issuperset(ends)

    def num_stored(self, prefix: Prefix, num_tokens: int, unit: int, *, states: bool = True) -> int:
        """Return the number of tokens in the longest possible hit, given the chunks that were saved
        and not removed.
        """
        found = 0
        full = [number for number, group in enumerate(self.groups) if group.kind == "full"]
        while found + unit <= num_tokens and all(
            self._has(number, prefix, found, found + unit) for number in full
        ):
            found += unit
        others = [
            n
            for n, group in enumerate(self.groups)
            if group.kind != "full" and (states or group.kind != "state")
        ]
        while found and not all(self._has(number, prefix, 0, found) for number in others):
            found -= unit
        return found

    def check_stored(self, req_id: str, prefix: Prefix, num_tokens: int, unit: int) -> None:
        """Check that all tokens of a finished request except the last token are stored, unless
        chunks may be missing.

        Mamba groups store only the states that vLLM offers.
        """
        if self.why_lossy is None:
            whole = num_tokens - num_tokens % unit
            found = self.num_stored(prefix, num_tokens, unit, states=False)
            self.expect(
                found >= whole, f"{req_id} ended, but only {found} of its {whole} tokens are stored"
            )

    def check_at_rest(self) -> None:
        """Check that every rank has reported all of its saves and loads (I10)."""
        for ticket, planned in self.tickets.items():
            self.expect(
                len(planned.reported) == self.num_ranks,
                f"ticket {ticket} was never reported by all ranks (I10)",
            )
        for load_id, ranks in self.loads.items():
            self.expect(
                len(ranks) == self.num_ranks,
                f"load {load_id} was never reported by all ranks (I10)",
            )
