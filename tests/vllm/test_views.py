"""Tests the conversion of vLLM's requests and steps to views: real Request objects, both shapes of
a resumed request, mixed prompts, and KV from other sources.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.request import Request

from kvloft.seam.batch import Tables
from kvloft.seam.shape import CacheShape, GroupShape
from kvloft.seam.views import EmbedRows
from kvloft.vllm import views
from kvloft.vllm.identity.adapters import AdapterNames
from kvloft.vllm.views import VllmRequest, tables_of, view_step


def request(**changes: Any) -> Request:
    fields: dict[str, Any] = {
        "request_id": "r",
        "prompt_token_ids": list(range(10)),
        "sampling_params": SamplingParams(max_tokens=4),
        "pooling_params": None,
    }
    return Request(**(fields | changes))


def raw(rows: EmbedRows) -> bytes:
    return np.asarray(rows.rows).tobytes()


def test_token_ids_are_vllms_own_growing_list() -> None:
    vllm_request = request()
    live = VllmRequest(vllm_request, AdapterNames())
    before, num_prompt_tokens = live.tokens()
    vllm_request.append_output_token_ids(77)
    assert live.tokens()[0] is before
    assert list(before) == [*range(10), 77]
    assert num_prompt_tokens == 10


@pytest.mark.parametrize(
    ("params", "wish"),
    [
        ({"kvloft": {"save": "prompt"}}, "prompt"),
        ({"kvloft": {"save": "all"}, "other": 1}, "all"),
        ({"kvloft": {"save": "none"}}, None),
        ({"kvloft": "prompt"}, None),
        ({}, None),
        (None, None),
    ],
)
def test_a_request_can_choose_what_to_save(params: Any, wish: str | None) -> None:
    extra = {"kv_transfer_params": params} if params is not None else None
    live = VllmRequest(
        request(sampling_params=SamplingParams(max_tokens=4, extra_args=extra)), AdapterNames()
    )
    assert live.saves == wish


def test_embeds_only_prompt_is_one_run_of_raw_rows() -> None:
    rows = torch.randn(7, 5, dtype=torch.bfloat16)
    view = VllmRequest(request(prompt_token_ids=None, prompt_embeds=rows), AdapterNames()).view()
    (run,) = view.embeds
    assert (run.start, run.num_rows, run.dtype, run.width) == (0, 7, "bfloat16", 5)
    assert raw(run) == rows.view(torch.int16).numpy().tobytes()


def test_mixed_prompt_hashes_each_positions_model_input() -> None:
    rows = torch.randn(6, 3)
    mask = [True, False, False, True, True, False]
    mixed = request(
        prompt_token_ids=[1, 2, 3, 4, 5, 6], prompt_embeds=rows, prompt_is_token_ids=mask
    )
    runs = VllmRequest(mixed, AdapterNames()).view().embeds
    assert [(run.start, run.num_rows) for run in runs] == [(1, 2), (5, 1)]
    assert raw(runs[0]) == rows[1:3].numpy().tobytes()
    assert raw(runs[1]) == rows[5:6].numpy().tobytes()


@pytest.mark.parametrize(
    ("params", "skips"),
    [
        (None, False),
        ({"do_remote_prefill": False}, False),
        ({"do_remote_prefill": True}, True),
        ("text", False),
        ({"do_remote_decode": True}, False),
    ],
)
def test_a_request_with_kv_from_a_prefill_server_gets_no_offer(params: Any, skips: bool) -> None:
    live = request(
        sampling_params=SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params})
    )
    assert VllmRequest(live, AdapterNames()).skip_load == skips


def test_media_named_by_a_count_are_this_engines_own() -> None:
    feature = SimpleNamespace(
        identifier="renderer0-mm-1-image-0", mm_position=SimpleNamespace(offset=1, length=3)
    )
    live = request()
    live.mm_features = [feature]
    first, second = (
        VllmRequest(live, AdapterNames(media_prefix=name)).view().items for name in ("x|", "y|")
    )
    assert [item.identifier for item in (*first, *second)] == [
        f"{name}|{feature.identifier}" for name in "xy"
    ]
    assert VllmRequest(live, AdapterNames()).view().items[0].identifier == feature.identifier
    numbered, hashed = (
        VllmRequest(live, AdapterNames(media_prefix=name)).view() for name in ("x|", "")
    )
    assert (numbered.savable_tokens, hashed.savable_tokens) == (feature.mm_position.offset, None)


def test_a_request_whose_adapter_is_not_shared_saves_nothing() -> None:
    live = request()
    live.lora_request = SimpleNamespace(lora_name="a", lora_int_id=3, lora_path="/v1")
    unseen, seen = (VllmRequest(live, AdapterNames(are_seen=seen)) for seen in (False, True))
    assert (unseen.view().savable_tokens, seen.view().savable_tokens) == (0, None)
    assert unseen.view().adapter != unseen.view().adapter, "no request may find its chunks"
    assert (seen.uses_adapter(3), seen.uses_adapter(4)) == (True, False)
    assert not VllmRequest(request(), AdapterNames()).uses_adapter(3)


def test_hit_sources_never_exceed_taken_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses vLLM's labels if they are available (0.32 and newer), and otherwise stand-ins.

    Every token has a label.
    """
    labels = views.CacheHitSource or SimpleNamespace(
        HOST="host", DISK="disk", EXTERNAL_UNSPECIFIED="other"
    )
    monkeypatch.setattr(views, "CacheHitSource", labels)
    assert views.hit_sources({"host": 32, "disk": 16}, 16) == {labels.EXTERNAL_UNSPECIFIED: 16}
    expected = {labels.HOST: 32, labels.DISK: 16, labels.EXTERNAL_UNSPECIFIED: 16}
    assert views.hit_sources({"host": 32, "disk": 16}, 64) == expected
    monkeypatch.setattr(views, "CacheHitSource", None)
    assert views.hit_sources({"host": 32}, 32) == {}


def _step(resumed: set[str]) -> Any:
    cached = CachedRequestData(
        req_ids=["a", "b"],
        resumed_req_ids=resumed,
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None, ([7, 8],)],
        num_computed_tokens=[40, 32],
        num_output_tokens=[1, 2],
    )
    new = SimpleNamespace(req_id="n", num_computed_tokens=16, block_ids=([1, 2, 3],))
    return SimpleNamespace(
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"a": 1, "b": 9, "n": 20},
        total_num_scheduled_tokens=30,
        scheduled_spec_decode_tokens={"a": [5, 6]},
        preempted_req_ids={"z"},
    )


def test_running_requests_extend_their_table() -> None:
    view = view_step(_step(set()))
    assert (list(view.running), list(view.num_computed_tokens)) == (["a", "b"], [40, 32])
    assert view.grown == [("b", [7, 8])]
    assert [(n.req_id, n.num_computed_tokens, list(n.block_ids)) for n in view.new] == [
        ("n", 16, [1, 2, 3])
    ]
    assert (view.num_draft_tokens, view.total_scheduled_tokens) == ({"a": 2}, 30)
    assert view.preempted == {"z"}


def test_resumed_request_is_new_with_its_whole_table() -> None:
    view = view_step(_step({"b"}))
    assert (list(view.running), list(view.num_computed_tokens), view.grown) == (["a"], [40], [])
    assert [(n.req_id, n.num_computed_tokens, list(n.block_ids)) for n in view.new] == [
        ("n", 16, [1, 2, 3]),
        ("b", 32, [7, 8]),
    ]


def test_with_several_groups_all_blocks_are_reported_and_tables_requested() -> None:
    step = _step({"b"})
    step.scheduled_cached_reqs.new_block_ids = [([4], [5, 6]), ([7], [8])]
    step.scheduled_new_reqs[0].block_ids = ([1, 2], [3])
    tables = {"a": ([0, 4], [5, 6]), "gone": ()}
    step.kv_connector_block_state = SimpleNamespace(
        resolve_block_ids=tables.get, boundary_state_offloads={"a": [(1, 6, 48)], "z": [(1, 9, 16)]}
    )
    view = view_step(step, partial(Tables, main=1))
    assert {req_id: list(blocks) for req_id, blocks in view.grown} == {
        "a": [4, 5, 6],
        "n": [1, 2, 3],
        "b": [7, 8],
    }
    assert [(new.req_id, list(new.block_ids)) for new in view.new] == [("n", []), ("b", [])]
    assert view.states == [("a", 1, 6, 48)], (
        "a preempted request's blocks may belong to another request"
    )
    found: Any = view.tables
    assert (found("a").tables, found("a")[:1], len(found("a"))) == (tables["a"], [5], 2)
    assert found("gone") is None


def test_tables_are_counted_in_chunks_of_the_main_group() -> None:
    """If block sizes differ, a chunk contains multiple blocks of a group. The table of a growing
    request can end inside a chunk.
    """
    shape = CacheShape(
        (GroupShape(16, 2, kind="window", reach=40), GroupShape(8, 4), GroupShape(32))
    )
    tables = tables_of(shape)([[0, 4, 5], [11, 12, 13, 14, 15], [7, 8]])
    assert (len(tables), tables[:1], tables[1:], tables[0:0]) == (1, [11, 12, 13, 14], [15], [])
    assert [tables.of(group, slice(0, 1)) for group in range(3)] == [[0, 4], [11, 12, 13, 14], [7]]
    assert [tables.size_of(group) for group in range(3)] == [2, 4, 1]
    assert (
        tables_of(CacheShape((GroupShape(16), GroupShape(16, kind="state"))))([[1], [2]]).per_unit
        is None
    )
