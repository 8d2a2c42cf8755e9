"""Bugs of a cache that serves several KV cache groups, each put into kvloft by one patch."""

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
"""No group keeps a whole prefix."""
HALF_BLOCKS = ("window of half blocks", "windows from the midst of a chunk")
"""Chunks have two blocks of a window."""
LOAD = r"were given for it \(I6\)|not all of them saved"


def mutant(bug: str, says: str, *where: str) -> Any:
    """Put the patch into the table, under its function's name."""

    def add(patch: Patch) -> Patch:
        SERVED_MUTANTS.append(Mutant(patch.__name__, bug, says, patch, where))
        return patch

    return add


# -- which blocks a hit needs
# -------------------------------------------------------------------------------------


Row = tuple[int | None, str, int, int, int, int]
"""Number in the keys, kind, tokens per block, blocks per unit, blocks kept, reach."""


def change_groups(mp: pytest.MonkeyPatch, change: Callable[[Row], Row]) -> None:
    """``change(row)`` for what the session is told of each group."""
    swap(mp, store, "groups_of", lambda original, shape: list(map(change, original(shape))))


def change_reach(mp: pytest.MonkeyPatch, kind: str, change: Callable[[int, int], int]) -> None:
    """``change(reach, unit_tokens)`` for groups of a kind."""
    change_groups(
        mp, lambda row: (*row[:5], change(row[5], row[2] * row[3])) if row[1] == kind else row
    )


def leave_out(mp: pytest.MonkeyPatch, pick: Callable[[list[Row]], int]) -> None:
    """The group that is picked needs nothing at a hit."""

    def groups_of(original: Any, shape: Any) -> Any:
        rows = original(shape)
        nth = pick(rows)
        number, _, *sizes, _ = rows[nth]
        rows[nth] = (number if number is not None else 99, "window", *sizes, 0)
        return rows

    swap(mp, store, "groups_of", groups_of)


def save_nothing_of(mp: pytest.MonkeyPatch, is_left_out: Callable[[Row], bool]) -> None:
    """Of groups' tables: states come one by one."""

    def reserve(original: Any, self: Any, rows: Any) -> Any:
        tables_of = lambda tables: [  # noqa: E731
            [0] * len(t) if is_left_out(g) else t for g, t in zip(self.groups, tables, strict=True)
        ]
        return original(self, [(*row, tables_of(tables)) for *row, tables in rows])

    swap(mp, SteadyStore, "reserve", reserve)


@mutant("LMCache #4463: a window is taken for one block shorter", LOAD, *WINDOWS)
def window_is_a_block_short(mp: pytest.MonkeyPatch) -> None:
    change_reach(mp, "window", lambda reach, unit: max(0, reach - unit))


@mutant("a local chunk is taken to begin where the hit ends", LOAD, *LOCALS)
def local_chunk_is_not_loaded(mp: pytest.MonkeyPatch) -> None:
    change_reach(mp, "local", lambda reach, unit: unit)


@mutant(
    "sglang #38031, LMCache #4674: a hit goes as deep as attention does, whatever states there are",
    LOAD,
    *STATES,
)
def states_are_not_asked(mp: pytest.MonkeyPatch) -> None:
    change_groups(mp, lambda row: (row[0], "window", *row[2:5], 0) if row[1] == "state" else row)
    save_nothing_of(mp, lambda row: row[5] == 0 and row[1] == "window")


@mutant(
    "LMCache #4674: one group is not asked at a hit, and its blocks hold anything",
    LOAD,
    *WINDOWS,
    *STATES,
    "four windows",
)
def last_group_is_missing_at_a_hit(mp: pytest.MonkeyPatch) -> None:
    leave_out(mp, lambda rows: max(nth for nth, row in enumerate(rows) if row[1] != "full"))


@mutant(
    "vLLM #46971: the drafter's own group is neither saved nor loaded",
    f"{LOAD}|ended, and of its",
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
    "vLLM cannot compute the last token alone beside windows and states: a hit of the whole prompt",
    "tokens offered beyond",
)
def hit_is_the_whole_prompt(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp,
        PrefixLookup,
        "max_units",
        lambda original, self, num_tokens: num_tokens // self._unit_tokens,
    )


@mutant("LMCache #4247: chunks before the local hit's end are loaded, too", LOAD)
def load_begins_before_the_local_hits_end(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp,
        SteadyLease,
        "batch",
        lambda original, self, tables, begin, end: original(self, tables, 0, end),
    )


@mutant("LMCache #4247: behind a local hit only full attention is loaded", LOAD, *WINDOWS, *STATES)
def only_attention_is_loaded_behind_a_local_hit(mp: pytest.MonkeyPatch) -> None:
    def batch(original: Any, self: Any, tables: Any, begin: int, end: int) -> Any:
        chunks, by_tier = original(self, tables, begin, end)
        full = [own for group, own in chunks.by_group() if self._store.groups[group][1] == "full"]
        return (full[0] if full else ()) if begin else chunks, by_tier

    swap(mp, SteadyLease, "batch", batch)


# -- windows in every layer
# ---------------------------------------------------------------------------------------


@mutant(
    "LMCache #4463: with windows only, each is taken for one block shorter", LOAD, *ONLY_WINDOWS
)
def only_windows_are_a_block_short(mp: pytest.MonkeyPatch) -> None:
    change_reach(mp, "window", lambda reach, unit: max(0, reach - unit))


@mutant(
    "with windows only, a hit is as deep as the prompt has blocks",
    "tokens are stored, only",
    *ONLY_WINDOWS,
)
def only_windows_are_not_asked(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp, SteadyStore, "deepest_hit", lambda original, self, chain, host, stored: (stored, stored)
    )


@mutant(
    "with windows only, the whole prompt is offered, and vLLM goes back a token out of its window",
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
    "of a window that failed to load vLLM is told blocks, and goes on before them",
    "null block|WrongKV|position",
    "one window",
)
def bad_blocks_of_the_one_window_are_told(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp,
        KVLoftGroupsConnector,
        "get_transfer_results",
        lambda original, self, ids: super(type(self), self).get_transfer_results(ids),
    )


# -- blocks of different sizes
# ------------------------------------------------------------------------------------


@mutant(
    "the blocks of a chunk are taken the wrong way round",
    r"out of order",
    *HALF_BLOCKS,
    "window of long blocks",
)
def blocks_of_a_chunk_are_turned(mp: pytest.MonkeyPatch) -> None:
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
    "the second block of a chunk is the next chunk's",
    r"computed \(I2\)|known \(I7\)|not all of them saved",
    *HALF_BLOCKS,
)
def second_block_is_the_next_chunks(mp: pytest.MonkeyPatch) -> None:
    """Of the window: its table is read a block further on."""

    def reserve(original: Any, self: Any, rows: Any) -> Any:
        move = (  # noqa: E731
            lambda tables: [
                table[(group[3] > 1) :] for group, table in zip(self.groups, tables, strict=True)
            ]
        )
        return original(self, [(*row, move(tables)) for *row, tables in rows])

    swap(mp, SteadyStore, "reserve", reserve)


@mutant(
    "chunks are as long as the main group's blocks, whatever the others have",
    r"not all of them saved|ended, and of its|were given for it \(I6\)",
    *HALF_BLOCKS,
)
def unit_is_the_main_groups_block(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(shape, "in_units", tuple)


@mutant(
    "of a chunk with several blocks of a window only the last is kept",
    "not all of them saved|ended, and of its",
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
    "vLLM has a hit's blocks in units of its own",
    f"offered beyond|not all of them saved|{BARE}",
    *HALF_BLOCKS,
)
def hits_end_at_the_shortest_blocks(mp: pytest.MonkeyPatch) -> None:
    """Half a unit more is offered than is there."""

    change_offers(mp, lambda num_tokens, _, unit_tokens: num_tokens + unit_tokens // 2)


# -- what is saved
# ------------------------------------------------------------------------------------------------


@mutant(
    "keys do not tell groups apart, and one group's block is another's",
    "one key, two prefixes|ended, and of its|not all of them saved",
    "four windows",
    "six windows",
)
def keys_without_the_group(mp: pytest.MonkeyPatch) -> None:
    change_groups(mp, lambda row: row if row[1] == "full" else (2, *row[1:]))


@mutant("vLLM #45704: one block table stands for all groups", r"\(I6\)", *WINDOWS, *LOCALS)
def tables_are_all_the_main_ones(mp: pytest.MonkeyPatch) -> None:
    def reserve(original: Any, self: Any, rows: Any) -> Any:
        main = next(nth for nth, group in enumerate(self.groups) if group[0] is None)
        return original(self, [(*row, [tables[main]] * len(tables)) for *row, tables in rows])

    swap(mp, SteadyStore, "reserve", reserve)


@mutant(
    "LMCache #5248: a window's block is saved after vLLM gave it up",
    r"\(I6\)|does not hold its key's KV|known \(I7\)",
    *WINDOWS,
)
def window_is_saved_after_it_was_given_up(mp: pytest.MonkeyPatch) -> None:
    """From tables that only grow, a step late."""
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
    "sglang #38031: a state is kept under the boundary before its own",
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
    "dynamo: states are read off the table like attention, also running ones",
    "that vLLM does not offer",
    *STATES,
)
def states_are_saved_from_the_table(mp: pytest.MonkeyPatch) -> None:
    change_groups(mp, lambda row: (row[0], "window", *row[2:5], 1) if row[1] == "state" else row)


@mutant(
    "Mooncake #45785: states are never saved, and nothing says so",
    "was offered and is not saved",
    *STATES,
)
def states_are_never_saved(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(StatePlanner, "plan", lambda self, step: [])


def states_saved_from(mp: pytest.MonkeyPatch, pick: Callable[[list[int], int], int]) -> None:
    """``pick(row, block)``: the block that is saved in the place of ``block``, which is in a
    group's ``row`` of the table.
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
    "SGLang #22134: the running state is saved, which is some tokens further",
    "that vLLM does not offer",
    *DRAFTED_STATES,
)
def running_state_is_saved(mp: pytest.MonkeyPatch) -> None:
    states_saved_from(mp, lambda row, block: row[-1])


@mutant(
    "vLLM takes results before it settles the state that accepted drafts passed; who saves there "
    "saves what the block held before",
    "does not hold its key's KV|state after",
    *DRAFTED_STATES,
)
def state_is_saved_before_accepted_drafts_are_settled(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp,
        WorkerHalf,
        "take_finished",
        lambda original, self: (self.core.run_saves(), original(self))[1],
    )


def states_saved_if(mp: pytest.MonkeyPatch, is_there: Callable[[list[int], int], bool]) -> None:
    """In the place of the planner's check of the group's row of the table."""

    def is_in_table(self: Any, request: Any, state: Any) -> bool:
        return is_there(request.blocks.tables[state.group], state.block)

    mp.setattr(StatePlanner, "is_in_table", is_in_table)


@mutant(
    "vLLM offers a state whose block it gave up in the same pass, behind drafts that were accepted",
    r"\(I6\)",
    *DRAFTED_STATES,
)
def state_is_saved_from_a_block_that_was_given_up(mp: pytest.MonkeyPatch) -> None:
    states_saved_if(mp, lambda row, block: True)


@mutant(
    "such a block was given out again, to the same request, for states after drafts",
    "does not hold its key's KV",
    STATES[0],
    NEXT_TO_STATES[1],
)
def state_is_saved_from_a_block_that_came_back(mp: pytest.MonkeyPatch) -> None:
    states_saved_if(mp, lambda row, block: block in row)


@mutant(
    "the state after a draft is saved, which may be rejected",
    "that vLLM does not offer",
    *DRAFTED_STATES,
)
def state_after_a_draft_is_saved(mp: pytest.MonkeyPatch) -> None:
    """From the column behind the state's own, where vLLM keeps the states after drafts."""
    states_saved_from(mp, lambda row, block: row[min(row.index(block) + 1, len(row) - 1)])


@mutant(
    "a draft stands for the token behind a state",
    r"known \(I7\)|one key, two prefixes|does not hold",
    *NEXT_TO_STATES,
)
def draft_is_in_the_key_of_a_state(mp: pytest.MonkeyPatch) -> None:
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
    "LMCache #5248: only the first group's blocks are fenced from saves that still read them",
    "does not hold its key's KV",
)
def fence_of_the_first_group_only(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(views, "_flatten", views._first_of)


@mutant(
    "vLLM #46971, #55503: beside a drafter, keys do not know the next token",
    "one key, two prefixes|known",
    *DRAFTERS,
)
def groups_beside_a_drafter_have_keys_without_the_next_token(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp, connector, "cache_shape", lambda original, *args: replace(original(*args), lookahead=0)
    )


@mutant(
    "DFlash keeps its KV beside the target's, and runs behind the target: who saves before it "
    "saves what was there",
    "does not hold its key's KV",
    *OF_DFLASH,
)
def saved_before_dflash(mp: pytest.MonkeyPatch) -> None:
    swap(mp, worker_half, "has_draft_kv", lambda original, config: False)


@mutant(
    "what DFlash keeps of a position is taken to depend on the next token, and hits end a block "
    "early",
    "are stored, only|offered and is not saved",
    *OF_DFLASH,
)
def dflash_is_taken_for_eagle(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(shape, "HIDDEN_DRAFTERS", (*shape.HIDDEN_DRAFTERS, "dflash"))


@mutant(
    "keys know the next token only where vLLM marks a drafter's group, as it does of MTP",
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
    "a draft model's KV is taken to depend on the next token, and hits end a block early",
    "are stored, only|offered and is not saved",
    *OF_DRAFT_MODELS,
)
def draft_model_is_taken_for_eagle(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(shape, "HIDDEN_DRAFTERS", (*shape.HIDDEN_DRAFTERS, "draft_model"))


@mutant(
    "a step without the drafter is saved in some group",
    "does not hold its key's KV",
    *OF_DFLASH,
    *DRAFTERS,
)
def steps_without_the_drafter_are_saved_in_groups(mp: pytest.MonkeyPatch) -> None:
    swap(mp, scheduler_half, "draft_limit", lambda original, config: original(config) and 1 << 20)


@mutant(
    "of a window that reaches into the midst of a chunk one block too few is kept",
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
    "of a chunk that is needed in part, the wrong part is loaded",
    "WrongKV|position",
    HALF_BLOCKS[1],
)
def part_of_a_chunk_is_its_begin(mp: pytest.MonkeyPatch) -> None:
    def scatter(original: Any, self: Any, group: int, copy: Any) -> None:
        original(self, group, copy._replace(first_block=0))

    swap(mp, CpuMover, "_scatter", scatter)


# -- reports
# ---------------------------------------------------------------------------------------------


@mutant("a load of which one group failed is reported as whole", "WrongKV|position|state after")
def failure_of_one_group_is_not_told(mp: pytest.MonkeyPatch) -> None:
    def load(original: Any, self: Any, group: int, copy: Any) -> Any:
        problem = original(self, group, copy)
        return None if group else problem

    swap(mp, CpuMover, "_load", load)


@mutant(
    "a load is reported when its first group has landed",
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
    "requests whose load failed are not named, and vLLM takes what was there",
    "WrongKV|position|state after",
)
def failed_requests_are_not_named(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp,
        KVLoftGroupsConnector,
        "_take_finished",
        lambda original, self: (original(self)[0], set()),
    )


@mutant("bad blocks are told of several groups, which ends the engine", "block-level load failures")
def bad_blocks_are_told(mp: pytest.MonkeyPatch) -> None:
    def take(original: Any, self: Any) -> Any:
        done = self._worker.take_finished()
        return done, set(self._worker.core.failed_loads)

    swap(mp, KVLoftGroupsConnector, "_take_finished", take)
