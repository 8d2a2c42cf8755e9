"""What the correctness machine knows of everything that was planned, saved, offered and reported, and what is wrong with it.

Breaches are collected and not raised, because they are noticed inside hooks, where the connector turns exceptions into misses.
It knows plans and vLLM's block tables; it must not know how kvloft makes a plan, nor how a store keeps anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .symbols import Prefix


@dataclass
class Planned:
    """A save that was planned: what its frame must hold, and which ranks reported it."""

    key: bytes
    words: list[int]
    ends: list[int]
    weights: int
    reported: set[int] = field(default_factory=set)
    has_failed: bool = False


@dataclass
class Ledger:
    """One for all lives of an engine on one disk."""

    num_ranks: int = 1
    layers: tuple[str, ...] = ("target",)
    """Of the group: a drafter's KV of a position knows the next token."""
    weights: int = 0
    namespace: str = ""
    """The user's, which says that a new life has other weights."""
    num_lives: int = 1
    breaches: list[str] = field(default_factory=list)
    truth: dict[bytes, list[int]] = field(default_factory=dict)
    """Words that the frame of a key holds, under the weights at hand."""
    saved: set[int] = field(default_factory=set)
    """Symbols of prefixes that were saved to their ends."""
    tickets: dict[int, Planned] = field(default_factory=dict)
    loads: dict[int, set[int]] = field(default_factory=dict)
    """Ranks that reported a load."""
    asked: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    admitted: dict[str, tuple[int, int]] = field(default_factory=dict)
    """First token and number of tokens of each request's load."""
    before: dict[int, int] = field(default_factory=dict)
    """Of KV in a drafter's layers, the prefix that it follows, whatever its next token; also of lives before, whose frames are
    loaded again."""
    why_lossy: str | None = None
    """Why something that was saved may be missing now; None: nothing may."""
    doubtful: set[str] = field(default_factory=set)
    """Requests for which a load failed: they need not be offered anything."""
    standing: set[str] = field(default_factory=set)
    """Requests with an offer of an earlier step, which stands: what was saved since is not in it."""
    num_saved: int = 0
    num_offered: int = 0

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.breaches.append(otherwise)

    def lose(self, why: str) -> None:
        self.why_lossy = self.why_lossy or why

    def new_life(self, *, has_new_weights: bool) -> None:
        """A restart: tickets, loads and requests of the old engine are gone."""
        self.num_lives += 1
        if has_new_weights:
            self.namespace += "w"
            self.new_weights()
        self.tickets.clear()
        self.loads.clear()
        self.asked.clear()
        self.admitted.clear()

    def new_weights(self) -> None:
        """Whatever is stored is wrong from now on."""
        self.weights = (self.weights + 0x5DEECE66D) & ((1 << 61) - 1)
        self.truth.clear()
        self.saved.clear()

    def kv(self, symbol: int, group: int = 0) -> int:
        """What memory holds at a position, for a group."""
        return symbol ^ self.weights ^ (group * 0x9E3779B97F4A)

    @property
    def ahead(self) -> int:
        """Tokens behind a block that its KV depends on."""
        return int("draft" in self.layers)

    def words(self, prefix: Prefix, begin: int, end: int, block: int) -> list[int]:
        """What blocks of positions [begin, end) hold, block after block, layer by layer."""
        found = list[int]()
        for at in range(begin, end, block):
            for layer in self.layers:
                first = at + (layer == "draft")
                found += [self.kv(symbol) for symbol in prefix.symbols[first : first + block]]
        return found

    def ends(self, prefix: Prefix, begin: int, end: int, block: int) -> list[int]:
        """What stands for each block's end in [begin, end): the prefix up to the last token that its KV depends on."""
        return [symbol ^ self.weights for symbol in prefix.symbols[begin + block - 1 + self.ahead : end + self.ahead : block]]

    # -- plans ----------------------------------------------------------------------------------------------------

    def check_save(self, save: Any, prefix: Prefix, table: Sequence[int], computed: int, block: int) -> None:
        """A save names blocks of its request (I6), whole ones, all of whose tokens are known and computed in this step (I2, I7)."""
        for copy in save.chunks:
            blocks = list(copy.blocks)
            if 0 in blocks or not set(blocks) <= set(table):
                self.breaches.append(f"save of blocks {blocks}, not all of {save.req_id}'s {list(table)} (I6)")
                continue
            begin = table.index(blocks[0]) * block
            end = begin + len(blocks) * block
            self.expect(
                blocks == list(table[begin // block : end // block]), f"save of {blocks}, out of order in {list(table)} (I6)"
            )
            self.expect(copy.first_block == 0 and len(blocks) == copy.num_blocks, f"save of a part of a chunk: {copy}")
            self.expect(end + self.ahead <= len(prefix), f"{save.req_id}: {end} tokens saved, {len(prefix)} known (I7)")
            self.expect(end <= computed, f"{save.req_id}: {end} tokens saved, {computed} computed (I2)")
            words = self.words(prefix, begin, end, block)
            known = self.truth.setdefault(copy.key, words)
            self.expect(known == words, f"{save.req_id}: one key, two prefixes (tokens {begin} to {end})")
            ends = self.ends(prefix, begin, end, block)
            self.expect(copy.ticket not in self.tickets, f"ticket {copy.ticket} planned twice (I10)")
            self.tickets[copy.ticket] = Planned(copy.key, words, ends, self.weights)

    def check_load(self, load: Any, prefix: Prefix, table: Sequence[int], block: int) -> None:
        """A load fills the blocks that were given for it, each with the chunk of its place (I1, I6)."""
        self.expect(load.load_id not in self.loads, f"load {load.load_id} planned twice (I10)")
        self.loads[load.load_id] = set()
        begin, count = self.admitted.get(load.req_id, (0, 0))
        wanted = list(table[begin // block : (begin + count) // block])
        named = [b for copy in load.chunks for b in copy.blocks] + list(load.lost)
        self.expect(named == wanted, f"{load.req_id}: load of blocks {named} where {wanted} were given for it (I6)")
        if load.lost:
            self.doubtful.add(load.req_id)
        for copy in load.chunks:
            if copy.blocks[0] not in table or (words := self.truth.get(copy.key)) is None:
                self.breaches.append(f"{load.req_id}: load of {copy.key.hex()[:8]}, which was not saved under these weights (I1)")
                continue
            at = table.index(copy.blocks[0]) * block
            size = len(copy.blocks) * block
            own, first = self.words(prefix, at, at + size, block), copy.first_block * block * len(self.layers)
            self.expect(
                own == words[first : first + len(own)] and own, f"{load.req_id}: another prefix's chunk for tokens {at} on (I1)"
            )

    # -- what became of them --------------------------------------------------------------------------------------

    def landed(self, ticket: int, words: list[int]) -> None:
        """A rank gathered a save into its frame."""
        planned = self.tickets.get(ticket)
        self.expect(planned is not None, f"a copy for ticket {ticket}, which no step planned")
        if planned is not None:
            self.expect(words == planned.words, f"ticket {ticket}: the frame does not hold its key's KV (I1, I2)")

    def check_report(self, rank: int, report: Any) -> None:
        """Each ticket and load is reported once by each rank (I10)."""
        for ticket in (*report.saved, *report.failed):
            planned = self.tickets.get(ticket)
            if planned is None or rank in planned.reported:
                self.breaches.append(f"rank {rank} reported ticket {ticket} again, or unasked (I10)")
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
                self.breaches.append(f"rank {rank} reported load {result.load_id} again, or unasked (I10)")
                continue
            ranks.add(rank)
            if result.bad_keys or result.failed:
                self.doubtful.add(result.req_id)
                self.lose("a load failed")

    # -- offers ---------------------------------------------------------------------------------------------------

    def check_offer(self, req_id: str, prefix: Prefix, local: int, answer: int | None, block: int, chunk: int) -> None:
        """What is offered was saved; and all that was saved is offered, unless something may be missing."""
        self.asked[req_id] = (local, answer)
        if answer is None:
            return
        total = local + answer
        if answer:
            self.num_offered += 1
            self.expect(
                total <= len(prefix) and answer % block == 0, f"{req_id}: {answer} tokens offered beyond {local} of {len(prefix)}"
            )
            ends = self.ends(prefix, local, total, block)
            self.expect(
                len(ends) == answer // block and self.saved.issuperset(ends),
                f"{req_id}: offered {total} tokens, not all of them saved (I1)",
            )
        elif req_id in self.doubtful:
            return
        if self.why_lossy is None and req_id not in self.standing:
            found = self.num_stored(prefix, len(prefix) - self.ahead, chunk)
            self.expect(total >= found, f"{req_id}: {found} tokens are stored, only {total} offered (local: {local})")

    def num_stored(self, prefix: Prefix, num_tokens: int, chunk: int) -> int:
        """Tokens of full chunks that were saved and that nothing took away."""
        found = 0
        while found + chunk <= num_tokens and prefix.symbols[found + chunk - 1 + self.ahead] ^ self.weights in self.saved:
            found += chunk
        return found

    def check_stored(self, req_id: str, prefix: Prefix, num_tokens: int, chunk: int) -> None:
        """A request that ended well is stored, but for its last token, unless something may be missing."""
        if self.why_lossy is None:
            whole = num_tokens - num_tokens % chunk
            found = self.num_stored(prefix, num_tokens, chunk)
            self.expect(found >= whole, f"{req_id} ended, and of its {whole} tokens only {found} are stored")

    def check_at_rest(self) -> None:
        """Every rank reported everything (I10)."""
        for ticket, planned in self.tickets.items():
            self.expect(len(planned.reported) == self.num_ranks, f"ticket {ticket} was never reported by all ranks (I10)")
        for load_id, ranks in self.loads.items():
            self.expect(len(ranks) == self.num_ranks, f"load {load_id} was never reported by all ranks (I10)")
