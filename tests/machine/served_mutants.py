"""Bugs in caches that support multiple KV cache groups. Each bug is injected into kvloft by one
patch.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvloft import store
from kvloft.plan import save_planner
from kvloft.plan.lookup import PrefixLookup
from kvloft.plan.request_state import RequestState
from kvloft.plan.state_planner import StatePlanner
from kvloft.seam.batch import Tables
from kvloft.seam.shape import GroupShape
from kvloft.transfer.cpu import CpuMover
from kvloft.vllm import connector, scheduler_half, shape, views, worker_half
from kvloft.vllm.connector import KVLoftGroupsConnector
from kvloft.vllm.worker_half import WorkerHalf

from .mutants import BARE, Mutant, Patch, change_offers, swap
from .steady import SteadyLease, SteadyStore

SERVED_MUTANTS: list[Mutant] = []
WINDOWS, LOCALS, STATES = (
    ("window", "window of whole blocks"),
    ("local", "two locals"),
    ("state", "three states"),
)
DRAFTERS = ("window and drafter", "window of the drafter, too", "state and drafter")
NEXT_TO_STATES = ("state and drafter", "state, drafter with attention")
OF_DRAFT_MODELS = ("state and draft model", "states, draft model with attention")
DRAFTED_STATES = (*STATES, *NEXT_TO_STATES, *OF_DRAFT_MODELS, "state, dflash with attention")
OF_DFLASH = ("window and dflash", "dflash with a window")
ONLY_WINDOWS = ("one window", "two windows")
"""Models in which no group keeps a whole prefix."""
HALF_BLOCKS = ("window of half blocks", "windows from the midst of a chunk")
"""Models whose chunks contain two window blocks."""
LOAD = r"were given for it \(I6\)|not all of them saved|tokens are stored"


def mutant(bug: str, says: str, *where: str) -> Any:
    """Add the patch to the table under the name of its function."""

    def add(patch: Patch) -> Patch:
        SERVED_MUTANTS.append(Mutant(patch.__name__, bug, says, patch, where))
        return patch

    return add


# -- which blocks a hit needs
# -------------------------------------------------------------------------------------


Row = tuple[int | None, str, int, int, int, int]
"""Number in keys, kind, tokens per block, blocks per unit, kept blocks, and reach."""


def change_groups(mp: pytest.MonkeyPatch, change: Callable[[Row], Row]) -> None:
    """Pass each group's row in the session through ``change(row)``."""
    swap(mp, store, "groups_of", lambda original, shape: list(map(change, original(shape))))


def change_reach(mp: pytest.MonkeyPatch, kind: str, change: Callable[[int, int], int]) -> None:
    """Pass the reach of all groups of one kind through ``change(reach, unit_tokens)``."""
    change_groups(
        mp,
        lambda row: (
            (*row[:5], change(row[5], row[2] * row[3]), *row[6:]) if row[1] == kind else row
        ),
    )


def leave_out(mp: pytest.MonkeyPatch, pick: Callable[[list[Row]], int]) -> None:
    """Let hits ignore the blocks of the group that ``pick`` selects."""

    def groups_of(original: Any, shape: Any) -> Any:
        rows = original(shape)
        nth = pick(rows)
        row = rows[nth]
        number = row[0] if row[0] is not None else 99
        rows[nth] = (number, "window", *row[2:5], 0, *row[6:])
        return rows

    swap(mp, store, "groups_of", groups_of)


def save_nothing_of(mp: pytest.MonkeyPatch, is_left_out: Callable[[Row], bool]) -> None:
    """Save no chunks of the selected groups, except Mamba states, which have a separate path."""

    def reserve(original: Any, self: Any, rows: Any) -> Any:
        tables_of = lambda tables: [  # noqa: E731
            [0] * len(t) if is_left_out(g) else t for g, t in zip(self.groups, tables, strict=True)
        ]
        return original(self, [(*row, tables_of(tables)) for *row, tables in rows])

    swap(mp, SteadyStore, "reserve", reserve)


@mutant("LMCache #4463: a window is treated as one block shorter", LOAD, *WINDOWS)
def window_is_a_block_short(mp: pytest.MonkeyPatch) -> None:
    change_reach(mp, "window", lambda reach, unit: max(0, reach - unit))


@mutant("a local chunk is treated as starting where the hit ends", LOAD, *LOCALS)
def local_chunk_is_not_loaded(mp: pytest.MonkeyPatch) -> None:
    change_reach(mp, "local", lambda reach, unit: unit)


@mutant(
    "sglang #38031, LMCache #4674: a hit is as deep as attention's, without regard to states",
    LOAD,
    *STATES,
)
def states_are_not_looked_up(mp: pytest.MonkeyPatch) -> None:
    change_groups(
        mp, lambda row: (row[0], "window", *row[2:5], 0, *row[6:]) if row[1] == "state" else row
    )
    save_nothing_of(mp, lambda row: row[5] == 0 and row[1] == "window")


@mutant(
    "LMCache #4674: one group is not looked up, and its blocks have arbitrary content",
    LOAD,
    *WINDOWS,
    *STATES,
    "four windows",
)
def last_group_is_missing_at_a_hit(mp: pytest.MonkeyPatch) -> None:
    leave_out(mp, lambda rows: max(nth for nth, row in enumerate(rows) if row[1] != "full"))


@mutant(
    "vLLM #46971: the draft model's group is neither saved nor loaded",
    f"{LOAD}|ended, but only",
    *DRAFTERS,
    OF_DRAFT_MODELS[0],
)
def group_of_the_drafter_is_missing(mp: pytest.MonkeyPatch) -> None:
    def last(rows: list[Row]) -> int:
        full = [nth for nth, row in enumerate(rows) if row[1] == "full"]
        return (
            full[-1]
            if len(full) > 1
            else max(nth for nth, row in enumerate(rows) if row[1] != "full")
        )

    leave_out(mp, last)
    save_nothing_of(mp, lambda row: row[1] == "window" and row[5] == 0)


@mutant(
    "a hit of the whole prompt: vLLM cannot compute the last token alone with windows and states",
    "tokens offered beyond",
)
def hit_is_the_whole_prompt(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp,
        PrefixLookup,
        "max_units",
        lambda original, self, num_tokens: num_tokens // self._unit_tokens,
    )


@mutant("LMCache #4247: chunks inside the local hit are loaded too", LOAD)
def load_begins_before_the_local_hits_end(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp,
        SteadyLease,
        "batch",
        lambda original, self, tables, begin, end: original(self, tables, 0, end),
    )


@mutant("LMCache #4247: after a local hit only full attention is loaded", LOAD, *WINDOWS, *STATES)
def only_attention_is_loaded_after_a_local_hit(mp: pytest.MonkeyPatch) -> None:
    def batch(original: Any, self: Any, tables: Any, begin: int, end: int) -> Any:
        chunks, by_tier = original(self, tables, begin, end)
        full = [own for group, own in chunks.by_group() if self._store.groups[group][1] == "full"]
        return (full[0] if full else ()) if begin else chunks, by_tier

    swap(mp, SteadyLease, "batch", batch)


# -- windows in every layer
# ---------------------------------------------------------------------------------------


@mutant(
    "LMCache #4463: with windows only, each window is treated as one block shorter",
    LOAD,
    *ONLY_WINDOWS,
)
def only_windows_are_a_block_short(mp: pytest.MonkeyPatch) -> None:
    change_reach(mp, "window", lambda reach, unit: max(0, reach - unit))


@mutant(
    "with windows only, a hit is always as long as the prompt",
    "tokens are stored, only",
    *ONLY_WINDOWS,
)
def only_windows_are_not_looked_up(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp, SteadyStore, "deepest_hit", lambda original, self, chain, host, stored: (stored, stored)
    )


@mutant(
    "with windows only, the whole prompt is offered, and vLLM goes back a token before its window",
    "offered beyond",
    *ONLY_WINDOWS,
)
def hit_of_only_windows_is_the_whole_prompt(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp,
        PrefixLookup,
        "max_units",
        lambda original, self, num_tokens: num_tokens // self._unit_tokens,
    )


@mutant(
    "bad blocks of a window are reported, and vLLM continues before these blocks",
    "null block|WrongKV|position",
    "one window",
)
def bad_blocks_of_the_one_window_are_reported(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp,
        KVLoftGroupsConnector,
        "get_transfer_results",
        lambda original, self, ids: super(type(self), self).get_transfer_results(ids),
    )


# -- blocks of different sizes
# ------------------------------------------------------------------------------------


@mutant(
    "the blocks of a chunk are in reverse order",
    r"out of order",
    *HALF_BLOCKS,
    "window of long blocks",
)
def blocks_of_a_chunk_are_reversed(mp: pytest.MonkeyPatch) -> None:
    def turned(table: list[int], size: int) -> list[int]:
        whole = len(table) // size * size
        return [
            block for at in range(0, whole, size) for block in table[at : at + size][::-1]
        ] + table[whole:]

    def reserve(original: Any, self: Any, rows: Any) -> Any:
        turn = lambda tables: [  # noqa: E731
            turned(table, group[3]) for group, table in zip(self.groups, tables, strict=True)
        ]
        return original(self, [(*row, turn(tables)) for *row, tables in rows])

    swap(mp, SteadyStore, "reserve", reserve)


@mutant(
    "the second block of a chunk belongs to the next chunk",
    r"computed \(I2\)|known \(I7\)|not all of them saved",
    *HALF_BLOCKS,
)
def second_block_is_the_next_chunks(mp: pytest.MonkeyPatch) -> None:
    """Read one block too far in the window's table."""

    def reserve(original: Any, self: Any, rows: Any) -> Any:
        move = (  # noqa: E731
            lambda tables: [
                table[(group[3] > 1) :] for group, table in zip(self.groups, tables, strict=True)
            ]
        )
        return original(self, [(*row, move(tables)) for *row, tables in rows])

    swap(mp, SteadyStore, "reserve", reserve)


@mutant(
    "chunks are as long as the main group's blocks in all groups",
    r"not all of them saved|ended, but only|were given for it \(I6\)",
    *HALF_BLOCKS,
)
def unit_is_the_main_groups_block(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(shape, "in_units", tuple)


@mutant(
    "a chunk with multiple window blocks keeps only the last block",
    "not all of them saved|ended, but only",
    *HALF_BLOCKS,
)
def last_block_of_a_chunk_is_kept_only(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp,
        GroupShape,
        "kept_blocks",
        lambda original, self: 1 if self.kind == "window" else original(self),
    )


@mutant(
    "a hit is not a multiple of vLLM's blocks",
    f"offered beyond|not all of them saved|{BARE}",
    *HALF_BLOCKS,
)
def hits_end_at_the_shortest_blocks(mp: pytest.MonkeyPatch) -> None:
    """Offer half a unit more than the stored tokens."""

    change_offers(mp, lambda num_tokens, _, unit_tokens: num_tokens + unit_tokens // 2)


# -- saves
# -------------------------------------------------------------------------------------------------


@mutant(
    "keys do not contain the group, so groups return each other's blocks",
    "one key, two prefixes|ended, but only|not all of them saved",
    "four windows",
    "six windows",
)
def keys_without_the_group(mp: pytest.MonkeyPatch) -> None:
    change_groups(mp, lambda row: row if row[1] == "full" else (2, *row[1:]))


@mutant("vLLM #45704: one block table is used for all groups", r"\(I6\)", *WINDOWS, *LOCALS)
def all_groups_use_the_main_table(mp: pytest.MonkeyPatch) -> None:
    def reserve(original: Any, self: Any, rows: Any) -> Any:
        main = next(nth for nth, group in enumerate(self.groups) if group[0] is None)
        return original(self, [(*row, [tables[main]] * len(tables)) for *row, tables in rows])

    swap(mp, SteadyStore, "reserve", reserve)


@mutant(
    "LMCache #5248: a block of a window is saved after vLLM has freed it",
    r"\(I6\)|does not hold its key's KV|known \(I7\)",
    *WINDOWS,
)
def window_is_saved_after_it_was_freed(mp: pytest.MonkeyPatch) -> None:
    """Use tables that are one step old and that only grow."""
    seen: dict[str, list[list[int]]] = {}

    def refresh(original: Any, request: Any, step: Any) -> bool:
        if not original(request, step):
            return False
        now = [list(table) for table in request.blocks.tables]
        before = seen.get(request.req_id, now) if request.saved_units else now
        seen[request.req_id] = merged = [
            [
                new or old
                for new, old in zip(table, [*old_table, *table[len(old_table) :]], strict=False)
            ]
            for table, old_table in zip(now, before, strict=True)
        ]
        request.blocks = Tables(merged, request.blocks.main, request.blocks.per_unit)
        request.saved_units = 0
        return True

    swap(mp, save_planner, "refresh_tables", refresh)


@mutant(
    "sglang #38031: a state is saved under the previous boundary",
    "one key, two prefixes|another prefix's|ended|not all of them saved|offered and is not saved",
    *STATES,
)
def state_is_saved_under_another_boundary(mp: pytest.MonkeyPatch) -> None:
    def reserve(original: Any, self: Any, rows: Any) -> Any:
        return original(
            self, [(chain, group, max(0, unit - 1), block) for chain, group, unit, block in rows]
        )

    swap(mp, SteadyStore, "reserve_states", reserve)


@mutant(
    "dynamo: states are read from the block table like attention, including running ones",
    "that vLLM does not offer",
    *STATES,
)
def states_are_saved_from_the_table(mp: pytest.MonkeyPatch) -> None:
    change_groups(
        mp, lambda row: (row[0], "window", *row[2:5], 1, *row[6:]) if row[1] == "state" else row
    )


@mutant(
    "Mooncake #45785: states are never saved, without an error",
    "was offered and is not saved",
    *STATES,
)
def states_are_never_saved(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(StatePlanner, "plan", lambda self, step: [])


def states_saved_from(mp: pytest.MonkeyPatch, pick: Callable[[list[int], int], int]) -> None:
    """Save the block that ``pick(row, block)`` returns instead of ``block``.

    ``row`` is the group's row in the block table.
    """
    tables: list[Any] = []

    def reserve(original: Any, self: Any, rows: Any) -> Any:
        return original(
            self, [(chain, group, unit, other(group, block)) for chain, group, unit, block in rows]
        )

    def other(group: int, block: int) -> int:
        found = [pick(table[group], block) for table in tables if block in table[group]]
        return next(filter(None, found), block)

    def plan(original: Any, self: Any, step: Any) -> Any:
        tables[:] = [step.tables(state.req_id).tables for state in step.states]
        return original(self, step)

    swap(mp, StatePlanner, "plan", plan)
    swap(mp, SteadyStore, "reserve_states", reserve)


@mutant(
    "SGLang #22134: the running state, which is some tokens ahead, is saved",
    "that vLLM does not offer",
    *DRAFTED_STATES,
)
def running_state_is_saved(mp: pytest.MonkeyPatch) -> None:
    states_saved_from(mp, lambda row, block: row[-1])


@mutant(
    "vLLM processes results before it copies the state of accepted draft tokens; saves at that "
    "time read the block's old content",
    "does not hold its key's KV|state after",
    *DRAFTED_STATES,
)
def state_is_saved_before_accepted_drafts_are_copied(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp,
        WorkerHalf,
        "take_finished",
        lambda original, self: (self.core.run_saves(), original(self))[1],
    )


def states_saved_if(mp: pytest.MonkeyPatch, is_there: Callable[[list[int], int], bool]) -> None:
    """Replace the planner's check that a state's block is in its group's block table."""

    def is_in_table(self: Any, request: Any, state: Any) -> bool:
        return is_there(request.blocks.tables[state.group], state.block)

    mp.setattr(StatePlanner, "is_in_table", is_in_table)


@mutant(
    "vLLM offers a state whose block it freed in the same pass, after accepted draft tokens",
    r"\(I6\)",
    *DRAFTED_STATES,
)
def state_is_saved_from_a_freed_block(mp: pytest.MonkeyPatch) -> None:
    states_saved_if(mp, lambda row, block: True)


@mutant(
    "such a block was allocated again to the same request, for states after draft tokens",
    "does not hold its key's KV",
    STATES[0],
    NEXT_TO_STATES[1],
)
def state_is_saved_from_a_reallocated_block(mp: pytest.MonkeyPatch) -> None:
    states_saved_if(mp, lambda row, block: block in row)


@mutant(
    "the state after a draft token, which may be rejected, is saved",
    "that vLLM does not offer",
    *DRAFTED_STATES,
)
def state_after_a_draft_is_saved(mp: pytest.MonkeyPatch) -> None:
    """Save the column after the state's column, where vLLM keeps states after draft tokens."""
    states_saved_from(mp, lambda row, block: row[min(row.index(block) + 1, len(row) - 1)])


@mutant(
    "a draft token is used as the token after a state",
    r"known \(I7\)|one key, two prefixes|does not hold",
    *NEXT_TO_STATES,
)
def draft_token_is_in_the_key_of_a_state(mp: pytest.MonkeyPatch) -> None:
    drafts: dict[str, list[int]] = {}

    def drafted(original: Any, self: Any) -> Any:
        return [*original(self), *(token for token in drafts.get(self.req_id, ()) if token >= 0)]

    def plan(original: Any, self: Any, step: Any) -> Any:
        with pytest.MonkeyPatch.context() as now:
            swap(now, RequestState, "confirmed_tokens", drafted)
            return original(self, step)

    def view(original: Any, output: Any, *more: Any) -> Any:
        drafts.clear()
        drafts.update(output.scheduled_spec_decode_tokens)
        return original(output, *more)

    swap(mp, scheduler_half, "view_step", view)
    swap(mp, StatePlanner, "plan", plan)


@mutant(
    "LMCache #5248: only the first group's blocks are protected while saves read them",
    "does not hold its key's KV",
)
def fence_of_the_first_group_only(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(views, "_flatten", views._first_of)


@mutant(
    "vLLM #46971, #55503: with a draft model, keys do not include the next token",
    "one key, two prefixes|known",
    *DRAFTERS,
)
def groups_with_a_draft_model_have_keys_without_the_next_token(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp, connector, "cache_shape", lambda original, *args: replace(original(*args), lookahead=0)
    )


@mutant(
    "DFlash has its own KV next to the target's and runs after the target: earlier saves read "
    "stale KV",
    "does not hold its key's KV",
    *OF_DFLASH,
)
def saved_before_dflash(mp: pytest.MonkeyPatch) -> None:
    swap(mp, worker_half, "has_draft_kv", lambda original, config: False)


@mutant(
    "DFlash's KV at a position is treated as depending on the next token, and hits end a block "
    "early",
    "tokens are stored|offered and is not saved",
    *OF_DFLASH,
)
def dflash_is_treated_as_eagle(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(shape, "HIDDEN_DRAFTERS", (*shape.HIDDEN_DRAFTERS, "dflash"))


@mutant(
    "keys include the next token only for groups that vLLM marks, as with MTP",
    "one key, two prefixes|known",
    *DRAFTERS,
)
def lookahead_only_where_vllm_marks_a_group(mp: pytest.MonkeyPatch) -> None:
    def cache_shape(original: Any, vllm_config: Any, ranks: Any, *more: Any) -> Any:
        found, groups = original(vllm_config, ranks, *more), ranks[0].kv_cache_groups
        return (
            found if any(group.is_eagle_group for group in groups) else replace(found, lookahead=0)
        )

    swap(mp, connector, "cache_shape", cache_shape)


@mutant(
    "a separate draft model's KV is treated as depending on the next token; hits end a block early",
    "tokens are stored|offered and is not saved",
    *OF_DRAFT_MODELS,
)
def draft_model_is_treated_as_eagle(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(shape, "HIDDEN_DRAFTERS", (*shape.HIDDEN_DRAFTERS, "draft_model"))


@mutant(
    "some group saves blocks of a step without the draft model",
    "does not hold its key's KV",
    *OF_DFLASH,
    *DRAFTERS,
)
def steps_without_the_drafter_are_saved_in_groups(mp: pytest.MonkeyPatch) -> None:
    swap(mp, scheduler_half, "draft_limit", lambda original, config: original(config) and 1 << 20)


@mutant(
    "a window that starts inside a chunk keeps one block too few",
    LOAD,
    *HALF_BLOCKS,
    "window of longer blocks",
)
def kept_blocks_are_rounded_down(mp: pytest.MonkeyPatch) -> None:
    def kept(original: Any, self: GroupShape) -> int:
        is_window, reached = self.kind == "window", max(1, self.reach // self.block_tokens)
        return min(self.blocks_per_unit, reached) if is_window else int(original(self))

    swap(mp, GroupShape, "kept_blocks", kept)


@mutant(
    "the wrong part of a partially needed chunk is loaded",
    "WrongKV|position",
    HALF_BLOCKS[1],
)
def part_of_a_chunk_is_its_begin(mp: pytest.MonkeyPatch) -> None:
    def scatter(original: Any, self: Any, group: int, copy: Any) -> None:
        original(self, group, copy._replace(first_block=0))

    swap(mp, CpuMover, "_scatter", scatter)


# -- reports
# ---------------------------------------------------------------------------------------------


@mutant("a load with a failed group is reported as successful", "WrongKV|position|state after")
def failure_of_one_group_is_not_reported(mp: pytest.MonkeyPatch) -> None:
    def load(original: Any, self: Any, group: int, copy: Any) -> Any:
        problem = original(self, group, copy)
        return None if group else problem

    swap(mp, CpuMover, "_load", load)


@mutant(
    "a load is reported when its first group is complete",
    r"WrongKV|position|state after|not all of \w+'s \(I6\)",
)
def first_group_ends_the_load(mp: pytest.MonkeyPatch) -> None:
    def submit(original: Any, self: Any, plans: Any) -> None:
        original(
            self,
            [
                replace(plan, chunks=plan.chunks.by_group()[0][1]) if plan.chunks else plan
                for plan in plans
            ],
        )

    swap(mp, CpuMover, "submit_loads", submit)


@mutant(
    "requests with failed loads are not reported, and vLLM uses stale KV",
    "WrongKV|position|state after",
)
def failed_requests_are_not_named(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp,
        KVLoftGroupsConnector,
        "_take_finished",
        lambda original, self: (original(self)[0], set()),
    )


@mutant(
    "bad blocks are reported for multiple groups, which ends the engine",
    "block-level load failures",
)
def bad_blocks_are_reported_for_groups(mp: pytest.MonkeyPatch) -> None:
    def take(original: Any, self: Any) -> Any:
        done = self._worker.take_finished()
        return done, set(self._worker.core.failed_loads)

    swap(mp, KVLoftGroupsConnector, "_take_finished", take)
