"""Bugs with draft models that have their own KV. Each bug is injected into kvloft by one patch."""

from dataclasses import replace
from typing import Any

import pytest

from kvloft.plan import save_planner
from kvloft.plan.request_state import RequestState
from kvloft.transfer.cpu import CpuMover
from kvloft.vllm import connector, scheduler_half, worker_half

from .mutants import Mutant, Patch, swap

DRAFT_MUTANTS: list[Mutant] = []


def mutant(bug: str, says: str) -> Any:
    """Add the patch to the table under the name of its function."""

    def add(patch: Patch) -> Patch:
        DRAFT_MUTANTS.append(Mutant(patch.__name__, bug, says, patch))
        return patch

    return add


@mutant(
    "vLLM #46971, #55503: a hit keeps the draft model's last block for any next token",
    "one key, two prefixes|another prefix's chunk|does not hold its key's KV|known \\(I7\\)",
)
def last_block_of_a_drafter_is_kept(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp, connector, "cache_shape", lambda original, *args: replace(original(*args), lookahead=0)
    )


@mutant(
    "blocks are saved with draft tokens that are rejected later",
    r"known \(I7\)|computed \(I2\)|does not hold its key's KV",
)
def rejected_draft_is_saved(mp: pytest.MonkeyPatch) -> None:
    drafts: dict[str, list[int]] = {}

    def drafted(original: Any, self: Any) -> Any:
        """Bypass `confirmed_tokens`, which detects rolled-back tokens."""
        return [*original(self), *(token for token in drafts.get(self.req_id, ()) if token >= 0)]

    def view(original: Any, output: Any, *more: Any) -> Any:
        drafts.clear()
        drafts.update(output.scheduled_spec_decode_tokens)
        return original(output, *more)._replace(num_draft_tokens={})

    swap(mp, RequestState, "confirmed_tokens", drafted)
    swap(mp, scheduler_half, "view_step", view)


@mutant(
    "vLLM processes results before the draft model runs; saves at that time read stale KV",
    "does not hold its key's KV|position",
)
def saved_before_the_drafter(mp: pytest.MonkeyPatch) -> None:
    swap(mp, worker_half, "has_draft_kv", lambda original, config: False)


@mutant(
    "LMCache: only the target's layers are loaded, and the draft model reads stale KV",
    "WrongKV|position",
)
def layers_of_the_drafter_are_not_loaded(mp: pytest.MonkeyPatch) -> None:
    def scatter(original: Any, self: Any, group: int, copy: Any) -> None:
        draft, blocks = self._groups[group][1][1], list(copy.blocks)
        before = draft[blocks].copy()
        original(self, group, copy)
        draft[blocks] = before

    swap(mp, CpuMover, "_scatter", scatter)


@mutant(
    "vLLM skips a draft model with a shorter context limit in a step, and stale blocks are saved "
    "as its KV",
    "does not hold its key's KV",
)
def steps_without_the_drafter_are_saved(mp: pytest.MonkeyPatch) -> None:
    swap(mp, scheduler_half, "draft_limit", lambda original, config: original(config) and 1 << 20)


@mutant(
    "the longest request of a step determines if the draft model runs; new requests are ignored",
    "does not hold its key's KV",
)
def new_requests_do_not_count_as_the_longest(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp, save_planner, "longest_request", lambda original, view: original(view._replace(new=[]))
    )


@mutant(
    "DFlash needs one more token than other draft models, and so skips one more step",
    "does not hold its key's KV",
)
def drafters_limit_is_two_tokens_too_long(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp,
        scheduler_half,
        "draft_limit",
        lambda original, config: (limit := original(config)) and limit + 2,
    )
