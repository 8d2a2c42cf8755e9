"""Paged memory of symbols: one pool of blocks that all groups share, and the reads and writes of a
forward pass in each kind of layer.

This is the machine's model of vLLM's kernels. Attention: KV at every position. State, mode "align":
a block has the state after some number of tokens and is moved between columns of the table before a
forward pass, as `preprocess_mamba` does. Draft layers: KV at a position depends on the token after
it; rejected draft tokens and positions drafted ahead have garbage.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .groups import Group
from .ledger import Ledger
from .shape import Shape, layer_names
from .symbols import GARBAGE, POISON, extend


class WrongKV(AssertionError):
    """A block was read that does not hold its content."""


@dataclass
class Work:
    """One request's share of a step: positions [start, stop), then drafts."""

    req_id: str
    state: Any
    start: int
    stop: int
    drafts: list[int]

    @property
    def end(self) -> int:
        return self.stop + len(self.drafts)


class Memory:
    """``planes``: one tensor [blocks, words] for each layer of a group; groups share them, block by
    block.
    """

    def __init__(self, shape: Shape, ledger: Ledger) -> None:
        self._shape, self._ledger = shape, ledger
        words = max(group.block_tokens for group in shape.groups)
        num_planes = max(len(group.layers) for group in shape.groups)
        self.planes = [
            torch.full((shape.num_blocks, words), POISON, dtype=torch.int64)
            for _ in range(num_planes)
        ]
        self._words = [plane.numpy() for plane in self.planes]
        self.num_checked = self.num_of_others = 0

    def kv_caches(self) -> dict[str, Any]:
        """Tensors as a runner registers them: one per layer, or a list for a layer with states."""
        found: dict[str, Any] = {}
        for number, group in enumerate(self._shape.groups):
            size = group.block_tokens
            planes = [
                [plane[:, :2]] if group.kind == "state" else plane[:, :size]
                for plane in self.planes
            ]
            found |= dict(zip(layer_names(number, group), planes, strict=False))
        return found

    def zero(self, blocks: Iterable[int]) -> None:
        for words in self._words:
            words[list(blocks)] = 0

    def copy(self, copies: Iterable[Any]) -> None:
        for source, target in copies:
            for words in self._words:
                words[target] = words[source]

    # -- attention
    # -----------------------------------------------------------------------------------------

    def write(self, work: Work) -> None:
        """KV of the target's layers at all scheduled positions, draft tokens after the known ones;
        then states.
        """
        prefix = work.state.prefix
        symbols = prefix.symbols[work.start : work.stop]
        for draft in work.drafts:
            symbols.append(extend(symbols[-1], draft))
        for number, group in enumerate(self._shape.groups):
            if group.kind == "state":
                self._write_states(number, group, work, symbols)
            elif "target" in group.layers:
                self._write(
                    number,
                    group,
                    work,
                    0,
                    work.start,
                    [self._ledger.kv(symbol, number) for symbol in symbols],
                )

    def _write(
        self, number: int, group: Group, work: Work, plane: int, begin: int, values: Sequence[int]
    ) -> None:
        table, size, words = work.state.tables[number], group.block_tokens, self._words[plane]
        for position, value in enumerate(values, start=begin):
            block = table[position // size]
            if block == 0:
                raise WrongKV(
                    f"{work.req_id}: position {position} of group {number} is written to the null "
                    "block"
                )
            words[block, position % size] = value

    def check(self, work: Work) -> None:
        """The scheduled tokens attend to their prefix in every attention group of the target."""
        for number, group in enumerate(self._shape.groups):
            if group.kind != "state" and "target" in group.layers:
                begin = group.reads_from(work.start)
                self._compare(
                    number, group, work, 0, begin, work.state.prefix.symbols[begin : work.stop]
                )

    def check_drafter(self, work: Work) -> None:
        """The same for the draft model's layers, which run after sampling; EAGLE's KV of a position
        includes the next token.
        """
        if self._shape.drafter_tokens:
            # vLLM's own cache serves blocks of steps without the drafter, which cost acceptance
            # only
            return
        for number, group in enumerate(self._shape.groups):
            if group.drafter is not None:
                begin, ahead = group.reads_from(work.start), group.drafter == "draft"
                symbols = work.state.prefix.symbols[begin + ahead : work.state.computed + ahead]
                self._compare(
                    number, group, work, group.layers.index(group.drafter), begin, symbols
                )

    def _compare(
        self, number: int, group: Group, work: Work, plane: int, begin: int, symbols: Sequence[int]
    ) -> None:
        if not symbols:
            return
        size, table = group.block_tokens, work.state.tables[number]
        first, end = begin // size, begin + len(symbols)
        blocks = table[first : -(-end // size)]
        found = (
            self._words[plane][blocks, :size]
            .ravel()[begin - first * size : end - first * size]
            .tolist()
        )
        wanted = [self._ledger.kv(symbol, number) for symbol in symbols]
        self.num_checked += len(blocks)
        if 0 in blocks or (
            found != wanted and not self._are_of_others(work, found, wanted, begin, group, plane)
        ):
            at = next((i for i, value in enumerate(found) if value != wanted[i]), 0)
            raise WrongKV(
                f"{work.req_id}: position {begin + at} of [{begin}, {end}) in group {number} "
                f"({group.kind}, "
                f"{group.layers[plane]}), blocks {blocks}"
            )

    def _are_of_others(
        self,
        work: Work,
        found: Sequence[int],
        wanted: Sequence[int],
        begin: int,
        group: Group,
        plane: int,
    ) -> bool:
        """Return True if a draft model's blocks differ only in their last position, written by
        another continuation of the same prefix.

        vLLM's own cache returns such blocks: if two requests computed the same block, a hit takes
        one request's block and, as the proof of the continuation, the other's next block. It costs
        only the acceptance of draft tokens. kvloft's saves and loads must be exact: the ledger
        checks them.
        """
        if group.layers[plane] != "draft":
            return False
        last, symbols = group.block_tokens - 1, work.state.prefix.symbols
        others = [
            (at, f)
            for at, (f, w) in enumerate(zip(found, wanted, strict=True), start=begin)
            if f != w
        ]
        self.num_of_others += len(others)
        return all(
            at % group.block_tokens == last and self._ledger.before.get(f) == symbols[at]
            for at, f in others
        )

    # -- states
    # -----------------------------------------------------------------------------------------

    def begin_states(self, work: Work) -> None:
        """Move the running state to the column of this step, and check that it is the state after
        exactly ``start`` tokens.
        """
        state = work.state
        moved = False
        for number, group in enumerate(self._shape.groups):
            if group.kind != "state":
                continue
            table, size = state.tables[number], group.block_tokens
            before = state.columns.get(number, (work.start - 1) // size)
            now = state.columns[number] = -(-work.end // size) - 1
            column = now + state.accepted - 1
            if before not in (-1, now):
                self._words[0][table[now]] = self._words[0][table[before + state.accepted - 1]]
                column, moved = now, True
            if work.start:
                found = self._words[0][table[column], :2].tolist()
                if table[column] == 0 or found != [
                    self._ledger.kv(state.prefix.symbols[work.start - 1], number),
                    work.start,
                ]:
                    raise WrongKV(
                        f"{work.req_id}: state after {work.start} tokens, group {number}, column "
                        f"{column}: {found}"
                    )
        if moved:
            state.accepted = 1

    def _write_states(self, number: int, group: Group, work: Work, symbols: Sequence[int]) -> None:
        """The state after the known tokens; with draft tokens, one after each further token, in the
        next columns.
        """
        table, column = work.state.tables[number], work.state.columns[number]
        for i in range(len(work.drafts) + 1):
            after = work.stop + i
            value = self._ledger.kv(symbols[after - 1 - work.start], number)
            if table[column + i] == 0:
                raise WrongKV(
                    f"{work.req_id}: state after {after} tokens of group {number} is written to "
                    "the null block"
                )
            self._words[0][table[column + i], :2] = (value, after)

    def end_step(self, work: Work, *, has_drafter: bool = True) -> None:
        """After sampling: the drafter's layers, and the state at a block's end that accepted drafts
        passed.
        """
        state = work.state
        for number, group in enumerate(self._shape.groups):
            if group.kind == "state" and self._shape.num_drafts:
                self._settle_state(number, group, work)
            for plane, layer in enumerate(group.layers):
                if layer != "target" and has_drafter:
                    self._write_draft_layer(number, group, work, plane, state.computed)

    def _settle_state(self, number: int, group: Group, work: Work) -> None:
        """As vLLM's `postprocess_mamba`."""
        state, size = work.state, group.block_tokens
        table, column = state.tables[number], state.columns[number]
        boundary = state.computed // size * size
        if boundary >= work.stop:
            target = boundary // size - 1
            self._words[0][table[target]] = self._words[0][table[column + boundary - work.stop]]
            if target == column:
                state.accepted = 1

    def _write_draft_layer(
        self, number: int, group: Group, work: Work, plane: int, computed: int
    ) -> None:
        """A confirmed position includes its next token, if needed; rejected and future draft
        positions have garbage.
        """
        symbols, layer = work.state.prefix.symbols, group.layers[plane]
        shift = int(layer == "draft")
        known = [
            self._ledger.kv(symbol, number)
            for symbol in symbols[work.start + shift : computed + shift]
        ]
        if shift:
            self._ledger.before.update(zip(known, symbols[work.start : computed], strict=True))
        ahead = computed + self._shape.num_drafts + {"draft": -1, "model": 0, "dflash": 1}[layer]
        ahead = min(max(work.end, ahead), len(work.state.tables[number]) * group.block_tokens)
        self._write(number, group, work, plane, work.start, known + [GARBAGE] * (ahead - computed))
