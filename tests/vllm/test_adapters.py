"""Tests the identities of LoRA adapters.

Requests and engine runs share an adapter's KV only if the weights in the workers are known.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.lora.request import LoRARequest

from kvloft.vllm.identity import adapters, weights
from kvloft.vllm.identity.adapters import AdapterNames
from kvloft.vllm.identity.weights import LooksInTime, look

UNCACHED = ("a", None)
"""The result for an adapter named "a" whose requests are not cached."""
PACE = float(os.environ.get("TEST_PACE", "1"))


@pytest.fixture(autouse=True)
def _looks_are_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make file checks finish in time, even if this process is suspended for longer than a
    scheduler would wait.
    """
    monkeypatch.setattr(adapters, "LooksInTime", partial(LooksInTime, 60 * PACE))


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of an adapter that is older than the engine."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"one")
    files = look(str(folder))
    assert files is not None
    monkeypatch.setattr(adapters, "engine_start_s", lambda: files.latest_s + 0.01)
    time.sleep(0.05)  # longer than the resolution of file timestamps
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
    assert first != names.identify(lora), "the directory has another entry"


@pytest.mark.parametrize("change", ["content", "link"])
def test_an_adapter_that_changed_since_the_start_is_this_runs_own(
    adapter: Path, change: str
) -> None:
    """The files do not show which version workers have loaded or will reload after an eviction."""
    link = adapter.parent / "current"
    link.symlink_to(adapter)
    lora = LoRARequest("a", 1, str(link if change == "link" else adapter))
    names = AdapterNames()
    first = names.identify(lora)
    assert names.identify(lora) == first, "must be one adapter within the run"
    assert (AdapterNames().identify(lora) == first) == (change == "content")
    (adapter / "adapter_model.safetensors").write_bytes(b"trained further")
    assert first is not None and first[1] is not None
    assert names.identify(lora) == names.identify(lora) == UNCACHED, (
        "workers may have loaded either version"
    )


def test_an_adapter_that_changed_and_changed_back_is_not_shared(adapter: Path) -> None:
    """The files are restored with their original times, but workers may have loaded the other
    version in the meantime.
    """
    names, lora = AdapterNames(), LoRARequest("a", 1, str(adapter))
    first, seen = names.identify(lora), names._looks.look(str(adapter))
    replaced: list[int] = []
    names._on_replace = replaced.append
    names._looks = SimpleNamespace(look=iter([(None, None), seen, seen]).__next__)  # type: ignore[assignment]
    names._looks.look = lambda path, after=names._looks.look: after()  # type: ignore[method-assign,misc]
    assert first != UNCACHED
    assert [names.identify(lora) for _ in range(3)] == [UNCACHED] * 3
    assert replaced == [1], "workers may load the new files for running requests"


def test_an_adapter_loaded_in_place_is_not_shared(adapter: Path) -> None:
    """Workers load the adapter again in each step of the request. Later requests for the first path
    use the new weights, and so do running requests.
    """
    replaced: list[int] = []
    names = AdapterNames(on_replace=replaced.append)
    lora = LoRARequest("a", 1, str(adapter))
    first = names.identify(lora)
    assert names.identify(lora) == first and not replaced
    again = LoRARequest("a", 1, str(adapter.parent / "v2"), load_inplace=True)
    asked = (again, again, lora, lora)
    assert [names.identify(each) for each in asked] == [UNCACHED] * 4
    assert replaced == [1]
    assert names.identify(LoRARequest("a", 2, str(adapter))) == first, "the number is a new one"


def test_another_adapter_under_a_known_number_is_not_shared(adapter: Path) -> None:
    """Workers may have loaded either adapter under this number."""
    names = AdapterNames()
    assert names.identify(LoRARequest("a", 1, str(adapter))) != UNCACHED
    other = LoRARequest("b", 1, str(adapter))
    assert names.identify(other) == ("b", None)
    assert names.identify(LoRARequest("a", 1, str(adapter))) == UNCACHED
    assert AdapterNames().identify(other) != ("b", None)


def test_the_adapter_shape_of_a_request_counts(adapter: Path) -> None:
    loras: list[Any] = [
        SimpleNamespace(
            lora_name="a", lora_int_id=1, lora_path=str(adapter), is_3d_lora_weight=is_3d
        )
        for is_3d in (False, True)
    ]
    assert AdapterNames().identify(loras[0]) != AdapterNames().identify(loras[1])


@pytest.mark.parametrize("path", ["", "hub/adapter", "/no/such/folder"])
def test_adapters_of_which_no_file_is_seen_are_this_runs_own(path: str) -> None:
    """vLLM loads the hub's current version, or tensors from a trainer under an arbitrary path."""
    names = AdapterNames()
    loras: list[Any] = [
        SimpleNamespace(lora_name="a", lora_int_id=number, lora_path=path) for number in (1, 2)
    ]
    first, second = map(names.identify, loras)
    assert first != second
    assert names.identify(loras[0]) == first, "must be one adapter within the run"
    assert AdapterNames().identify(loras[0]) != first


def test_a_hub_adapter_is_identified_by_its_commit_offline(
    hub_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_cache("hub/adapter", "adapter_config.json", "c0ffee")
    lora = LoRARequest("a", 1, "hub/adapter")
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_OFFLINE", False
    )  # other tests in this process, or the user, may have set offline mode
    assert AdapterNames().identify(lora) != AdapterNames().identify(lora), (
        "vLLM checks the hub for a newer version"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    first = AdapterNames().identify(lora)
    assert first == AdapterNames().identify(lora)
    names = AdapterNames()
    assert names.identify(lora) == first
    hub_cache("hub/adapter", "adapter_config.json", "decade")
    assert AdapterNames().identify(lora) != first
    assert names.identify(lora) == UNCACHED, "workers may load the new commit at any time"


def test_an_adapter_downloaded_after_the_first_look_is_cached_in_this_run(
    hub_cache: Callable[[str, str, str], Path],
) -> None:
    names, lora = AdapterNames(), LoRARequest("a", 1, "hub/adapter")
    first = names.identify(lora)
    assert first is not None and first != UNCACHED
    hub_cache("hub/adapter", "adapter_config.json", "c0ffee")
    assert names.identify(lora) == names.identify(lora) == first
    hub_cache("hub/adapter", "adapter_config.json", "decade")
    assert names.identify(lora) == UNCACHED


@pytest.mark.parametrize("files", ["same", "changed", "unknown"])
def test_a_resumed_request_keeps_its_keys_only_if_the_files_are_the_same(
    adapter: Path, files: str
) -> None:
    """While a request is preempted, workers can evict its adapter. The workers load the adapter
    again later.
    """
    replaced: list[int] = []
    names, lora = AdapterNames(on_replace=replaced.append), LoRARequest("a", 1, str(adapter))
    assert names.identify(lora) != UNCACHED
    if files == "changed":
        (adapter / "adapter_model.safetensors").write_bytes(b"trained further")
    elif files == "unknown":
        names._looks = SimpleNamespace(look=Mock(side_effect=TimeoutError))  # type: ignore[assignment]
    names.check_again(lora)
    assert set(replaced) == (set() if files == "same" else {1})


def test_an_error_while_looking_is_a_miss_and_the_next_look_works(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = LoRARequest("a", 1, str(adapter))
    names = AdapterNames()
    first = names.identify(lora)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "look", lambda *_, **__: 1 / 0)
        assert names.identify(lora) != first
    assert names.identify(lora) == first


def test_a_file_system_that_hangs_delays_no_request(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with adapters are not cached until the file system responds."""
    lora = LoRARequest("a", 1, str(adapter))
    names = AdapterNames()
    first = names.identify(lora)
    names._looks._timeout_s = 0.1
    hangs, asked = threading.Event(), list[str]()
    monkeypatch.setattr(
        weights,
        "look",
        lambda path, **_: (asked.append(path), hangs.wait(), look(path, below=False))[2],
    )
    assert [names.identify(lora) for _ in range(5)] == [UNCACHED] * 5 != [first] * 5
    assert len(asked) == 1, "only the first request may wait"
    hangs.set()
    while names.identify(lora) != first:
        time.sleep(0.01)


def test_an_adapter_from_a_tensorizer_directory_is_not_shared_with_other_runs(
    adapter: Path,
) -> None:
    """Only vLLM 0.31 and older have this field in LoRARequest, so the test uses a stand-in."""
    lora: Any = SimpleNamespace(
        lora_name="a",
        lora_int_id=1,
        lora_path=str(adapter),
        tensorizer_config_dict={"tensorizer_dir": "x"},
    )
    assert AdapterNames().identify(lora) != AdapterNames().identify(lora)


def test_adapters_are_not_shared_if_their_loads_are_unseen(adapter: Path) -> None:
    names, lora = AdapterNames(are_seen=False), LoRARequest("a", 1, str(adapter))
    assert names.identify(lora) == UNCACHED
    assert names.identify(None) is None


def test_the_reason_is_logged_once_for_each_adapter(
    adapter: Path, logged: Callable[[], list[logging.LogRecord]]
) -> None:
    names = AdapterNames()
    for _ in range(3):
        for name in ("a", "b", "c"):
            names.identify(LoRARequest(name, 1, str(adapter)))
    found = [record.getMessage() for record in logged()]
    assert [message.split("'")[1] for message in found] == ["b", "c", "a"]
    assert all("may have been replaced (lora_int_id 1)" in message for message in found)
