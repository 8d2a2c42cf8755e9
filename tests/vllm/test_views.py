"""vLLM's requests and steps as views: real Request objects, both shapes of a resumed request, mixed prompts, adapters."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.request import Request

from kvloft.seam.views import EmbedRows
from kvloft.vllm import compat
from kvloft.vllm.identity import adapters, weights
from kvloft.vllm.identity.adapters import AdapterNames
from kvloft.vllm.identity.weights import look
from kvloft.vllm.views import VllmRequest, view_step


def request(**changes: Any) -> Request:
    fields: dict[str, Any] = {
        "request_id": "r", "prompt_token_ids": list(range(10)), "sampling_params": SamplingParams(max_tokens=4),
        "pooling_params": None,
    }  # fmt: skip
    return Request(**(fields | changes))


def raw(rows: EmbedRows) -> bytes:
    return np.asarray(rows.rows).tobytes()


def test_token_ids_are_vllms_own_growing_list() -> None:
    vllm_request = request()
    live = VllmRequest(vllm_request, AdapterNames())
    before = live.token_ids
    vllm_request.append_output_token_ids(77)
    assert live.token_ids is before
    assert list(before) == [*range(10), 77]
    assert live.num_prompt_tokens == 10


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
def test_a_request_may_say_what_to_save(params: Any, wish: str | None) -> None:
    extra = {"kv_transfer_params": params} if params is not None else None
    live = VllmRequest(request(sampling_params=SamplingParams(max_tokens=4, extra_args=extra)), AdapterNames())
    assert live.saves == wish


def test_embeds_only_prompt_is_one_run_of_raw_rows() -> None:
    rows = torch.randn(7, 5, dtype=torch.bfloat16)
    view = VllmRequest(request(prompt_token_ids=None, prompt_embeds=rows), AdapterNames()).view()
    (run,) = view.embeds
    assert (run.start, run.num_rows, run.dtype, run.width) == (0, 7, "bfloat16", 5)
    assert raw(run) == rows.view(torch.int16).numpy().tobytes()


def test_mixed_prompt_takes_each_position_from_what_the_model_reads() -> None:
    rows = torch.randn(6, 3)
    mask = [True, False, False, True, True, False]
    mixed = request(prompt_token_ids=[1, 2, 3, 4, 5, 6], prompt_embeds=rows, prompt_is_token_ids=mask)
    runs = VllmRequest(mixed, AdapterNames()).view().embeds
    assert [(run.start, run.num_rows) for run in runs] == [(1, 2), (5, 1)]
    assert raw(runs[0]) == rows[1:3].numpy().tobytes()
    assert raw(runs[1]) == rows[5:6].numpy().tobytes()


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An adapter's folder, older than the engine."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"one")
    files = look(str(folder))
    assert files is not None
    monkeypatch.setattr(adapters, "engine_start_s", lambda: files.latest_s + 0.01)
    time.sleep(0.05)  # more than a file system's clock tick
    return folder


def test_adapter_is_name_path_and_state_of_its_files(adapter: Path) -> None:
    lora = LoRARequest("a", 1, str(adapter))
    names = AdapterNames()
    first = names.identify(lora)
    assert names.identify(None) is None
    assert first == names.identify(lora) == AdapterNames().identify(lora) is not None
    assert first != names.identify(LoRARequest("b", 2, str(adapter)))
    (adapter / "checkpoint-1").mkdir()
    (adapter / "checkpoint-1" / "optimizer.pt").write_text("x")
    assert first != names.identify(lora), "the folder has another entry"


@pytest.mark.parametrize("change", ["content", "link"])
def test_an_adapter_that_changed_since_the_start_is_this_runs_own(adapter: Path, change: str) -> None:
    """Which state the workers loaded, and load after they had no room for it, files do not show."""
    link = adapter.parent / "current"
    link.symlink_to(adapter)
    lora = LoRARequest("a", 1, str(link if change == "link" else adapter))
    names = AdapterNames()
    first = names.identify(lora)
    assert names.identify(lora) == first, "within the run it is one adapter"
    assert (AdapterNames().identify(lora) == first) == (change == "content")
    (adapter / "adapter_model.safetensors").write_bytes(b"trained further")
    assert len({first, *(names.identify(lora) for _ in range(5))}) == 6, "workers may have either state"


def test_an_adapter_that_was_another_meanwhile_is_shared_with_nobody(adapter: Path) -> None:
    """Put back as it was, to the last time: workers may have loaded what was there in between."""
    names, lora = AdapterNames(), LoRARequest("a", 1, str(adapter))
    first, seen = names.identify(lora), names._looks.look(str(adapter))
    names._looks = SimpleNamespace(look=iter([None, seen, seen]).__next__)  # type: ignore[assignment]
    names._looks.look = lambda path, after=names._looks.look: after()  # type: ignore[method-assign,misc]
    assert len({first, *(names.identify(lora) for _ in range(3))}) == 4


def test_an_adapter_loaded_in_place_is_shared_with_nobody(adapter: Path) -> None:
    """Workers load it again in each step of the request."""
    names = AdapterNames()
    first = names.identify(LoRARequest("a", 1, str(adapter)))
    again = LoRARequest("a", 1, str(adapter), load_inplace=True)
    assert len({first, names.identify(again), names.identify(again)}) == 3
    assert names.identify(LoRARequest("a", 1, str(adapter))) == first


def test_another_adapter_under_a_known_number_is_shared_with_nobody(adapter: Path) -> None:
    """Workers go on with the one that they have."""
    names = AdapterNames()
    first = names.identify(LoRARequest("a", 1, str(adapter)))
    other = LoRARequest("b", 1, str(adapter))
    assert len({first, names.identify(other), names.identify(other), AdapterNames().identify(other)}) == 4
    assert names.identify(LoRARequest("a", 1, str(adapter))) == first


def test_the_shape_that_a_request_gives_its_adapter_counts(adapter: Path) -> None:
    loras: list[Any] = [
        SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(adapter), is_3d_lora_weight=is_3d) for is_3d in (False, True)
    ]
    assert AdapterNames().identify(loras[0]) != AdapterNames().identify(loras[1])


@pytest.mark.parametrize("path", ["", "hub/adapter", "/no/such/folder"])
def test_adapters_of_which_no_file_is_seen_are_this_runs_own(path: str) -> None:
    """vLLM loads what the hub has at that time, or tensors that a trainer hands over under a path that stands for nothing."""
    names = AdapterNames()
    loras: list[Any] = [SimpleNamespace(lora_name="a", lora_int_id=number, lora_path=path) for number in (1, 2)]
    first, second = map(names.identify, loras)
    assert first != second
    assert names.identify(loras[0]) == first, "but within the run it is one adapter"
    assert AdapterNames().identify(loras[0]) != first


def test_an_adapter_of_the_hub_is_told_apart_by_its_commit_when_offline(hub_cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_cache("hub/adapter", "adapter_config.json", "c0ffee")
    lora = LoRARequest("a", 1, "hub/adapter")
    assert AdapterNames().identify(lora) != AdapterNames().identify(lora), "vLLM asks the hub for a newer one"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    first = AdapterNames().identify(lora)
    assert first == AdapterNames().identify(lora)
    hub_cache("hub/adapter", "adapter_config.json", "decade")
    assert AdapterNames().identify(lora) != first


def test_an_error_while_looking_is_a_miss_and_the_next_look_works(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = LoRARequest("a", 1, str(adapter))
    names = AdapterNames()
    first = names.identify(lora)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "look", lambda *_, **__: 1 / 0)
        assert names.identify(lora) != first
    assert names.identify(lora) == first


@pytest.mark.timeout(60)
def test_a_file_system_that_hangs_holds_nobody_up(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile requests with adapters share with nobody."""
    lora = LoRARequest("a", 1, str(adapter))
    names = AdapterNames()
    first = names.identify(lora)
    hangs, asked = threading.Event(), list[str]()
    monkeypatch.setattr(weights, "look", lambda path, **_: (asked.append(path), hangs.wait(), look(path, below=False))[2])
    assert len({first, *(names.identify(lora) for _ in range(5))}) == 6
    assert len(asked) == 1, "only the first one waits"
    hangs.set()
    while names.identify(lora) != first:
        time.sleep(0.01)


def test_an_adapter_from_a_tensorizer_directory_is_this_runs_own(adapter: Path) -> None:
    """A field of vLLM 0.31 and older; 0.32's LoRARequest has it no more, so it is put on by hand."""
    lora: Any = SimpleNamespace(
        lora_name="a", lora_int_id=1, lora_path=str(adapter), tensorizer_config_dict={"tensorizer_dir": "x"}
    )
    assert AdapterNames().identify(lora) != AdapterNames().identify(lora)


def test_media_named_by_a_count_are_this_engines_own() -> None:
    feature = SimpleNamespace(identifier="renderer0-mm-1-image-0", mm_position=SimpleNamespace(offset=1, length=3))
    live = request()
    live.mm_features = [feature]
    first, second = (VllmRequest(live, AdapterNames(media_prefix=name)).view().items for name in ("x|", "y|"))
    assert [item.identifier for item in (*first, *second)] == [f"{name}|{feature.identifier}" for name in "xy"]
    assert VllmRequest(live, AdapterNames()).view().items[0].identifier == feature.identifier


def test_hit_sources_never_exceed_what_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own labels where it has them (0.32 and newer), stand-ins where it has not; and none of them without labels."""
    labels = compat.CacheHitSource or SimpleNamespace(HOST="host", DISK="disk", EXTERNAL_UNSPECIFIED="other")
    monkeypatch.setattr(compat, "CacheHitSource", labels)
    assert compat.hit_sources({"host": 32, "disk": 16}, 16) == {labels.EXTERNAL_UNSPECIFIED: 16}
    expected = {labels.HOST: 32, labels.DISK: 16, labels.EXTERNAL_UNSPECIFIED: 16}
    assert compat.hit_sources({"host": 32, "disk": 16}, 64) == expected
    monkeypatch.setattr(compat, "CacheHitSource", None)
    assert compat.hit_sources({"host": 32}, 32) == {}


def _step(resumed: set[str]) -> Any:
    cached = CachedRequestData(
        req_ids=["a", "b"], resumed_req_ids=resumed, new_token_ids=[], all_token_ids={},
        new_block_ids=[None, ([7, 8],)], num_computed_tokens=[40, 32], num_output_tokens=[1, 2],
    )  # fmt: skip
    new = SimpleNamespace(req_id="n", num_computed_tokens=16, block_ids=([1, 2, 3],))
    return SimpleNamespace(
        scheduled_new_reqs=[new], scheduled_cached_reqs=cached, num_scheduled_tokens={"a": 1, "b": 9, "n": 20},
        total_num_scheduled_tokens=30, scheduled_spec_decode_tokens={"a": [5, 6]}, preempted_req_ids={"z"},
    )  # fmt: skip


def test_running_requests_extend_their_table() -> None:
    view = view_step(_step(set()))
    assert (list(view.running), list(view.num_computed_tokens)) == (["a", "b"], [40, 32])
    assert view.grown == [("b", [7, 8])]
    assert [(n.req_id, n.num_computed_tokens, list(n.block_ids)) for n in view.new] == [("n", 16, [1, 2, 3])]
    assert (view.num_draft_tokens, view.total_scheduled_tokens) == ({"a": 2}, 30)
    assert view.preempted == {"z"}


def test_resumed_request_comes_as_new_with_its_whole_table() -> None:
    view = view_step(_step({"b"}))
    assert (list(view.running), list(view.num_computed_tokens), view.grown) == (["a"], [40], [])
    assert [(n.req_id, n.num_computed_tokens, list(n.block_ids)) for n in view.new] == [("n", 16, [1, 2, 3]), ("b", 32, [7, 8])]
