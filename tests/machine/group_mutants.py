"""Bugs with multiple KV cache groups. Each bug is injected into vLLM's own cache by one patch and
breaks a guarantee on which a connector with multiple groups relies.

These mutants test the oracle: a machine that does not detect them would not detect the bugs in
`served_mutants.py`, which are injected into kvloft.
"""

from typing import Any

import pytest
from vllm.v1.core import single_type_kv_cache_manager as managers
from vllm.v1.core.block_pool import BlockPool

from .mutants import Mutant, Patch, swap

GROUP_MUTANTS: list[Mutant] = []


def mutant(bug: str, says: str, *where: str) -> Any:
    """Add the patch to the table under the name of its function."""

    def add(patch: Patch) -> Patch:
        GROUP_MUTANTS.append(Mutant(patch.__name__, bug, says, patch, where))
        return patch

    return add


def change_hits(mp: pytest.MonkeyPatch, manager: Any, change: Any) -> None:
    """Pass the hits in ``manager``'s groups through ``change(blocks, length, kwargs)``."""
    original = manager.find_longest_cache_hit

    def find(cls: Any, **kwargs: Any) -> Any:
        found = original(**kwargs)
        is_pair = (
            isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], int)
        )  # vLLM 0.30 does not return a tuple
        blocks, length = (
            found if is_pair else (found, len(found[0]) * kwargs["kv_cache_spec"].block_size)
        )
        blocks, length = change(blocks, length, kwargs)
        return (blocks, length) if is_pair else blocks

    mp.setattr(manager, "find_longest_cache_hit", classmethod(find))


@mutant("a window's blocks are freed one block too early", r"\(window, target\)|null block")
def window_is_freed_a_block_early(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp,
        managers.SlidingWindowManager,
        "get_num_skipped_tokens",
        lambda original, self, n: max(0, original(self, n) + self.block_size),
    )


@mutant(
    "LMCache #4463: a window's first block is missing at a hit", r"\(window, target\)|null block"
)
def first_block_of_a_window_is_missing(mp: pytest.MonkeyPatch) -> None:
    def change(blocks: Any, length: int, kwargs: Any) -> Any:
        null = kwargs["block_pool"].null_block
        for table in blocks:
            real = [i for i, block in enumerate(table) if block is not null]
            if len(real) > 1:
                table[real[0]] = null
        return blocks, length

    change_hits(mp, managers.SlidingWindowManager, change)


@mutant(
    "LMCache #4674: one group is not looked up, and its blocks have arbitrary content",
    r"\(window, target\)|null block",
    "window",
)
def one_group_is_not_looked_up(mp: pytest.MonkeyPatch) -> None:
    def change(blocks: Any, length: int, kwargs: Any) -> Any:
        size, null = kwargs["kv_cache_spec"].block_size, kwargs["block_pool"].null_block
        count = (
            kwargs["max_length"] // kwargs["alignment_tokens"] * kwargs["alignment_tokens"] // size
        )
        return tuple([null] * count for _ in blocks), count * size

    change_hits(mp, managers.SlidingWindowManager, change)


@mutant("sglang #38031: a hit uses the state of a different boundary", "state after")
def state_of_the_boundary_before(mp: pytest.MonkeyPatch) -> None:
    def change(blocks: Any, length: int, kwargs: Any) -> Any:
        at = len(blocks[0]) - 2
        if at >= 0 and kwargs["kv_cache_spec"].block_size == kwargs["block_pool"].hash_block_size:
            before = kwargs["block_pool"].get_cached_block(
                kwargs["block_hashes"][at], kwargs["kv_cache_group_ids"]
            )
            for table, block in zip(blocks, before or (), strict=False):
                table[-1] = block
        return blocks, length

    change_hits(mp, managers.MambaManager, change)


@mutant("vLLM #53505: a state is used as a hit in the step that computes it", "state after")
def state_is_hit_in_the_step_that_writes_it(mp: pytest.MonkeyPatch) -> None:
    def cache(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.cached_blocks_this_step.clear()

    swap(mp, managers.MambaManager, "cache_blocks", cache)


@mutant(
    "a local chunk is treated as having a different length",
    r"\(local, target\)|null block",
    "local",
)
def local_chunk_is_freed_while_it_is_read(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp,
        managers.ChunkedLocalAttentionManager,
        "get_num_skipped_tokens",
        lambda original, self, n: n // self.block_size * self.block_size,
    )


@mutant(
    "after a change of weights, blocks computed with the old weights are hits",
    "WrongKV|position|state after",
)
def reset_keeps_blocks(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(
        BlockPool,
        "reset_prefix_cache",
        lambda self: self.num_gpu_blocks - self.get_num_free_blocks() == 1,
    )
