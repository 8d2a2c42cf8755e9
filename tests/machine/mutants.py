"""Real bugs in KV connectors. Each bug is injected into kvloft by one patch, and the correctness
machine must detect every bug.

``says`` is a regular expression for the expected message, because a patch that merely causes a
crash would prove nothing. If a product change removes the target of a patch, the test fails. In
that case, update the mutant instead of deleting it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvloft.plan import load_planner, save_planner, scheduler
from kvloft.plan.admission import Admission
from kvloft.plan.answers import Answer, Miss, Offer
from kvloft.plan.scheduler import SchedulerCore
from kvloft.seam.plan import LoadPlan
from kvloft.seam.views import MediaItem
from kvloft.transfer.frames import PrivatePart
from kvloft.transfer.worker import WorkerCore
from kvloft.vllm import scheduler_half
from kvloft.vllm.connector import KVLoftConnector
from kvloft.vllm.scheduler_half import SchedulerHalf
from kvloft.vllm.views import VllmRequest

from .engine import Engine
from .steady import SteadyStore

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """A patch that injects a bug.

    ``bug`` describes the bug as users reported it. ``says`` is a regular expression for the
    machine's message.
    """

    name: str
    bug: str
    says: str
    patch: Patch
    where: tuple[str, ...] = ()
    """Names of the groups with which the mutant is tested; empty for all groups."""


MUTANTS: list[Mutant] = []
BARE = r"^AssertionError\s*$"
"""Matches one of vLLM's own assertions, which would crash the engine."""


def mutant(bug: str, says: str) -> Callable[[Patch], Patch]:
    """Add the patch to the table under the name of its function."""

    def add(patch: Patch) -> Patch:
        MUTANTS.append(Mutant(patch.__name__, bug, says, patch))
        return patch

    return add


def swap(mp: pytest.MonkeyPatch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function, method or property with ``around(original, *args, **kwargs)``."""
    original = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    if isinstance(original, property):
        mp.setattr(owner, name, property(lambda self: around(original.fget, self)))
    else:
        mp.setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


def change_offers(mp: pytest.MonkeyPatch, change: Callable[[int, int, int], int]) -> None:
    """Replace the offered ``num_tokens`` with ``change(num_tokens, local_tokens, unit_tokens)``."""

    def match(original: Any, self: Any, request: Any, local_tokens: int, **more: Any) -> Answer:
        answer: Answer = original(self, request, local_tokens, **more)
        return (
            Offer(change(answer.num_tokens, local_tokens, self._unit_tokens))
            if isinstance(answer, Offer)
            else answer
        )

    swap(mp, Admission, "match", match)


# -- preemption
# ---------------------------------------------------------------------------------------------


@mutant(
    "LMCache: the block table of a resumed request is appended to its old one",
    "out of order|not all of|ended, but only|one key, two prefixes|another prefix's chunk",
)
def resumed_table_is_appended(mp: pytest.MonkeyPatch) -> None:
    def view(original: Any, output: Any, *more: Any) -> Any:
        cached = output.scheduled_cached_reqs
        resumed, cached.resumed_req_ids = cached.resumed_req_ids, set()
        found = original(output, *more)
        cached.resumed_req_ids = resumed
        return found

    swap(mp, scheduler_half, "view_step", view)


@mutant(
    "LMCache: KV is loaded only for new requests, and resumed requests read stale blocks",
    r"were given for it \(I6\)",
)
def resumed_are_not_loaded(mp: pytest.MonkeyPatch) -> None:
    def plan(original: Any, request: Any, unit_tokens: int, num_tokens: int, load_id: int) -> Any:
        found = original(request, unit_tokens, num_tokens, load_id)
        is_resumed = request.live.request.num_preemptions > 0
        return replace(found, plan=LoadPlan(request.req_id, load_id)) if is_resumed else found

    swap(mp, load_planner, "plan_load", plan)


# -- keys
# ---------------------------------------------------------------------------------------------


def without(mp: pytest.MonkeyPatch, **changes: Any) -> None:
    swap(mp, VllmRequest, "view", lambda original, self: replace(original(self), **changes))


@mutant(
    "LMCache #42119: prompt embeddings are not in the keys",
    "one key, two prefixes|not all of them saved",
)
def keys_without_embeddings(mp: pytest.MonkeyPatch) -> None:
    without(mp, embeds=())


@mutant(
    "LMCache, HF3FS: the adapter is not in the keys", "one key, two prefixes|not all of them saved"
)
def keys_without_adapter(mp: pytest.MonkeyPatch) -> None:
    without(mp, adapter=None)


@mutant("HF3FS: the cache salt is not in the keys", "one key, two prefixes|not all of them saved")
def keys_without_salt(mp: pytest.MonkeyPatch) -> None:
    without(mp, cache_salt=None)


@mutant("HF3FS: media are not in the keys", "one key, two prefixes|not all of them saved")
def keys_without_media(mp: pytest.MonkeyPatch) -> None:
    without(mp, items=())


@mutant(
    "LMCache #4086: media identifiers are cut to 16 bits and collide",
    "one key, two prefixes|not all of them saved",
)
def media_identifiers_are_cut(mp: pytest.MonkeyPatch) -> None:
    def cut(original: Any, self: Any) -> Any:
        view = original(self)
        return replace(
            view, items=tuple(MediaItem("image", i.start, i.num_tokens) for i in view.items)
        )

    swap(mp, VllmRequest, "view", cut)


@mutant(
    "sglang, LMCache: frames on disk are found with other weights",
    "not all of them saved|not saved under these",
)
def namespace_is_always_the_same(mp: pytest.MonkeyPatch) -> None:
    swap(mp, scheduler_half, "namespace_fields", lambda original, *args: [("engine", "vllm")])


# -- saves
# -------------------------------------------------------------------------------------------------


def with_frontier(mp: pytest.MonkeyPatch, change: Callable[[Any, int], int]) -> None:
    def changed(original: Any, request: Any, unit_tokens: int, frontier: int) -> Any:
        return original(request, unit_tokens, change(request, frontier))

    swap(mp, save_planner, "take_complete_units", changed)


@mutant(
    "Mooncake #45785: decoded tokens are never saved, without an error",
    r"ended, but only \d+ of its \d+ tokens",
)
def decode_is_never_saved(mp: pytest.MonkeyPatch) -> None:
    with_frontier(mp, lambda request, frontier: min(frontier, request.num_prompt_tokens))


@mutant(
    "LMCache: decoded tokens are read after num_computed_tokens, where async scheduling has none",
    r"ended, but only \d+ of its \d+ tokens",
)
def decode_is_not_saved_ahead_of_its_tokens(mp: pytest.MonkeyPatch) -> None:
    def due(original: Any, request: Any, unit_tokens: int, frontier: int) -> Any:
        if frontier > len(request.live.tokens()[0]):
            request.next_save = frontier + 1
            return None
        return original(request, unit_tokens, frontier)

    swap(mp, save_planner, "take_complete_units", due)


@mutant(
    "a whole chunked prompt is saved with its first chunk",
    r"tokens saved, \d+ computed \(I2\)",
)
def saved_before_computed(mp: pytest.MonkeyPatch) -> None:
    with_frontier(mp, lambda request, frontier: max(frontier, request.num_prompt_tokens))


@mutant(
    "vLLM hashes blocks before they are computed; saves by hash gather before the forward pass",
    "does not hold its key's KV",
)
def saved_before_the_forward(mp: pytest.MonkeyPatch) -> None:
    def begin(original: Any, self: Any, plan: Any) -> None:
        original(self, plan)
        self.run_saves()

    swap(mp, WorkerCore, "begin", begin)


@mutant("the last sampled token is saved without KV", r"tokens saved, \d+ computed \(I2\)")
def last_sampled_token_is_saved(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp,
        VllmRequest,
        "num_computed_tokens",
        lambda original, self: len(self.request._all_token_ids),
    )


@mutant(
    "a block table is read one block late",
    r"out of order|not all of|does not hold|tokens saved, \d+ known \(I7\)",
)
def saved_from_the_next_block(mp: pytest.MonkeyPatch) -> None:
    def reserve(original: Any, self: Any, rows: Any) -> Any:
        return original(
            self, [(*row, [[*table[1:], table[0]] for table in tables]) for *row, tables in rows]
        )

    swap(mp, SteadyStore, "reserve", reserve)


@mutant("the output of a request with prompt-only saves is saved", "its prompt only")
def save_prompts_only_is_ignored(mp: pytest.MonkeyPatch) -> None:
    swap(mp, VllmRequest, "saves", lambda original, self: None)


# -- blocks and frames in flight
# ----------------------------------------------------------------------------------


@mutant(
    "LMCache #5248, vLLM #45704: a block is rewritten while a save reads it",
    "does not hold its key's KV",
)
def no_fence_before_a_block_is_rewritten(mp: pytest.MonkeyPatch) -> None:
    swap(mp, scheduler, "rewritten_blocks", lambda original, *args: ())


@mutant(
    "a load is reported when it is submitted, and its request reads stale KV",
    "WrongKV|position",
)
def load_is_reported_before_it_is_complete(mp: pytest.MonkeyPatch) -> None:
    def take(original: Any, self: Any) -> Any:
        finished, bad = original(self)
        told = self.__dict__.setdefault("told", set())
        early = {load.req_id for load in self._plan.loads if load.load_id not in told}
        told.update(load.load_id for load in self._plan.loads)
        del finished
        return early, bad

    swap(mp, WorkerCore, "take_finished_loads", take)


@mutant(
    "dynamo #14416: tokens in vLLM's own cache are counted twice",
    f"tokens offered|not all of them|{BARE}",
)
def local_hits_are_offered_again(mp: pytest.MonkeyPatch) -> None:
    change_offers(mp, lambda num_tokens, local_tokens, _: num_tokens + local_tokens)


@mutant(
    "LMCache #4247: chunks from the start of the prefix are loaded after the local hit",
    r"for tokens \d+ on|\(I6\)",
)
def load_begins_at_the_wrong_chunk(mp: pytest.MonkeyPatch) -> None:
    def plan(original: Any, request: Any, *args: Any) -> Any:
        local, request.local_tokens = request.local_tokens, 0
        found = original(request, *args)
        request.local_tokens = local
        return found

    swap(mp, load_planner, "plan_load", plan)


@mutant(
    "vLLM's KV-load checks were assert statements: a damaged frame is loaded", "WrongKV|position"
)
def frames_are_not_checked(mp: pytest.MonkeyPatch) -> None:
    swap(mp, PrivatePart, "fetch", lambda original, *args: original(*args) and None)


def in_place(part: PrivatePart, copy: Any, *layout: Any) -> dict[str, Any]:
    """Describe a part at its location in the frame, so that the frame is sealed or checked instead
    of a private copy.
    """
    memory = part._frames.memory
    offset = memory.start(copy.frame) + memory.part_offset
    return part._describe(copy, *layout) | {"offset": offset}


@mutant(
    "a dead engine's worker writes between the copy to a frame and its seal: a valid tag over "
    "wrong bytes",
    "not hold its key's",
)
def frames_are_sealed_in_place(mp: pytest.MonkeyPatch) -> None:
    def store(original: Any, part: Any, copy: Any, *layout: Any) -> None:
        part._frames.part(copy.frame)[:-128] = part.bytes[:-128]
        part._frames._arena.seal(in_place(part, copy, *layout))

    swap(mp, PrivatePart, "store", store)


@mutant(
    "a dead engine's worker writes between the check of a frame and the copy from the frame",
    "WrongKV|position|state after",
)
def frames_are_checked_in_place(mp: pytest.MonkeyPatch) -> None:
    def fetch(original: Any, part: Any, copy: Any, *layout: Any) -> Any:
        problem = part._frames._arena.check(in_place(part, copy, *layout))
        part.bytes[:] = part._frames.part(copy.frame)
        return problem

    swap(mp, PrivatePart, "fetch", fetch)


# -- reports
# ---------------------------------------------------------------------------------------------


@mutant("a save is reported twice", "again, or unasked")
def save_is_reported_twice(mp: pytest.MonkeyPatch) -> None:
    def take(original: Any, self: Any) -> Any:
        report, before = original(self), self.__dict__.get("before", ())
        if report is None:
            return None
        self.__dict__["before"] = report.saved
        return replace(report, saved=report.saved + before)

    swap(mp, WorkerCore, "take_report", take)


@mutant("vLLM #46240: a load is reported again after its request ended", BARE)
def load_is_reported_twice(mp: pytest.MonkeyPatch) -> None:
    def take(original: Any, self: Any) -> Any:
        finished, bad = original(self)
        both = finished | self.__dict__.get("before", set())
        self.__dict__["before"] = finished
        return both, bad

    swap(mp, WorkerCore, "take_finished_loads", take)


@mutant(
    "LMCache #5047: the load of an aborted request is never reported",
    "does not become idle|requests|tokens are stored",
)
def load_of_an_aborted_request_is_not_reported(mp: pytest.MonkeyPatch) -> None:
    def finished(original: Any, self: Any, ended: set[str]) -> Any:
        gone = self.__dict__.setdefault("gone", set())
        gone |= ended
        sent, received = original(self, ended)
        return sent, {req_id for req_id in received or () if req_id not in gone}

    swap(mp, KVLoftConnector, "get_finished", finished)


@mutant("a failed save is committed", "wrong content|WrongKV")
def failed_save_is_committed(mp: pytest.MonkeyPatch) -> None:
    def settle(self: Any, saved: Any, failed: Any = ()) -> Any:
        return self.session.settle([*saved, *failed], [])

    mp.setattr(SteadyStore, "settle", settle, raising=False)


@mutant(
    "a chunk is visible when the first of two ranks has written it",
    "not all of them saved|wrong content|does not hold its key's KV",
)
def first_rank_settles_for_all(mp: pytest.MonkeyPatch) -> None:
    def open_session(original: Any, self: Any, **settings: Any) -> Any:
        return original(self, **settings | {"num_ranks": 1})

    swap(mp, Engine, "_open_session", open_session)


# -- offers, ends and resets
# --------------------------------------------------------------------------------------


@mutant(
    "a hit is one block longer than the stored prefix",
    f"not all of them saved|tokens offered|{BARE}",
)
def hit_is_one_block_too_long(mp: pytest.MonkeyPatch) -> None:
    change_offers(mp, lambda num_tokens, _, unit_tokens: num_tokens + unit_tokens)


@mutant("vLLM: a synchronous load is visible to other requests before its bytes have arrived", BARE)
def loads_are_synchronous(mp: pytest.MonkeyPatch) -> None:
    swap(
        mp, SchedulerHalf, "match", lambda original, self, *args: (original(self, *args)[0], False)
    )


@mutant("a request that must not read the cache gets an offer", "asked for no cached KV")
def skip_reading_is_ignored(mp: pytest.MonkeyPatch) -> None:
    swap(mp, VllmRequest, "skip_load", lambda original, self: False)


@mutant(
    "hits are missed: requests with a local hit get no offer",
    "tokens are stored, only",
)
def nothing_is_offered_after_a_local_hit(mp: pytest.MonkeyPatch) -> None:
    def match(original: Any, self: Any, request: Any, local_tokens: int, **more: Any) -> Answer:
        return Miss() if local_tokens else original(self, request, local_tokens, **more)  # type: ignore[no-any-return]

    swap(mp, Admission, "match", match)


@mutant("sglang: an aborted request's pins are never released", "pins|frames_reserved")
def pins_of_a_finished_request_stay(mp: pytest.MonkeyPatch) -> None:
    def finish(original: Any, self: Any, req_id: Any) -> None:
        if (request := self._requests.get(req_id)) is not None:
            self.__dict__.setdefault("kept", []).append(
                request.lease
            )  # dropping a lease unpins its chunks
            request.lease = None
        original(self, req_id)

    swap(mp, SchedulerCore, "finish", finish)


@mutant(
    "weights were replaced without clearing the cache",
    "not all of them saved|not saved under these",
)
def reset_keeps_the_store(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(SteadyStore, "clear", lambda self: None)
