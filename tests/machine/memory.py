"""Paged memory that holds symbols: a pool of blocks that all groups share, and a forward pass's
reads and writes in each kind of layer.

This module is the machine's model of vLLM's kernels. Attention layers have KV at every position.
With Mamba states in mode "align", a block contains the state after a number of tokens. Before a
forward pass, the state is moved between columns of the table, as in `preprocess_mamba`. In the
draft layers of EAGLE and MTP, KV at a position depends on the next token. In all draft layers,
positions of rejected or future draft tokens contain garbage.
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
    """A forward pass read a block with the wrong content."""


@dataclass
class Work:
    """The work of a step for one request: positions [start, stop), followed by draft tokens."""

    req_id: str
    state: Any
    start: int
    stop: int
    drafts: list[int]

    @property
    def end(self) -> int:
        return self.stop + len(self.drafts)


class Memory:
    """The memory of all groups.

    ``planes`` contains one tensor [blocks, words] per layer of a group. All groups share these
    tensors, and each block belongs to one group at a time.
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
        """Return the tensors as a runner registers them: one per layer, or a list for a layer with
        Mamba states.
        """
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
        """Write the KV of the target model's layers for all scheduled tokens: known tokens, then
        draft tokens. Then write the states.
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
        """Check that the scheduled tokens attend to their prefix in every attention group of the
        target model.
        """
        for number, group in enumerate(self._shape.groups):
            if group.kind != "state" and "target" in group.layers:
                begin = group.reads_from(work.start)
                self._compare(
                    number, group, work, 0, begin, work.state.prefix.symbols[begin : work.stop]
                )

    def check_drafter(self, work: Work) -> None:
        """Do the same as `check`, but for the draft model's layers, which run after sampling.

        With EAGLE, the KV of a position depends on the next token.
        """
        if self._shape.drafter_tokens:
            # vLLM's own cache also returns blocks from steps that skipped the draft model. Such
            # blocks only lower the acceptance rate.
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
        """Return True if a draft model's blocks are wrong only in their last positions, which were
        written for a different continuation of the same prefix.

        vLLM's own cache returns such blocks: if two requests computed the same block and continued
        differently, a hit can combine this block of one request with the next block of the other
        request. Such blocks only lower the acceptance rate of draft tokens. kvloft's saves and
        loads must be exact; the ledger checks them.
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
        """Write the state after the known tokens.

        With draft tokens, also write the state after each draft token, in the following columns.
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
        """Do the work that follows sampling: run the draft model's layers and, if accepted draft
        tokens complete a block, write the state at its end.
        """
        state = work.state
        for number, group in enumerate(self._shape.groups):
            if group.kind == "state" and self._shape.num_drafts:
                self._settle_state(number, group, work)
            for plane, layer in enumerate(group.layers):
                if layer != "target" and has_drafter:
                    self._write_draft_layer(number, group, work, plane, state.computed)

    def _settle_state(self, number: int, group: Group, work: Work) -> None:
        """Finalize the state as vLLM's `postprocess_mamba` does."""
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
        """Write the KV of a draft layer.

        The KV of a confirmed position depends on the next token in layers that need it. Positions
        of rejected and future draft tokens contain garbage.
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
