"""Tests how vLLM finds kvloft (by name, by module path or inside MultiConnector) and how invalid
settings are reported.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from . import tiny
from .cache_server import of_own_store
from .client import BLOCK, Engine, EngineError, Req, kvloft, random_ids
from .conftest import Truth

REQUEST = Req(random_ids(6000, 100), max_tokens=10)


@pytest.mark.parametrize("how", ["name", "module"])
def test_found_by_name_and_by_module_path(
    truth: Truth, start: Callable[..., Engine], how: str
) -> None:
    config = kvloft() | ({"kv_connector_module_path": "kvloft.vllm"} if how == "module" else {})
    engine = start(kv_transfer_config=config)
    for num_external in (0, 96):
        result = engine.ask(REQUEST.again())[0]
        assert (result.tokens, result.num_external) == (truth.tokens(REQUEST), num_external)
    assert engine.metrics()["vllm:kvloft_load_tokens_host_total"] == 96


def test_works_inside_multi_connector(truth: Truth, start: Callable[..., Engine]) -> None:
    children = [kvloft(namespace=name) for name in ("first", "second")]
    config: dict[str, Any] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }
    engine = start(kv_transfer_config=config)
    for num_external in (0, 96, 96):
        result = engine.ask(REQUEST.again())[0]
        assert (result.tokens, result.num_external) == (truth.tokens(REQUEST), num_external)
    assert not engine.state()["busy"]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"disk_pth": "/tmp/x"}, r"disk_pth.*disk_path"),
        pytest.param({"host_size": "8 parsecs"}, r"host_size.*8 parsecs", marks=of_own_store),
    ],
)
def test_a_wrong_setting_stops_the_start_and_is_named(
    start: Callable[..., Engine], extra: dict[str, Any], said: str
) -> None:
    with pytest.raises(EngineError, match=f"(?s){said}"):
        start(kv_transfer_config=kvloft(**extra))


@pytest.mark.parametrize(
    "environment", [{}, {"KVLOFT_HOST_SZE": "1GiB"}], ids=["extra config", "environment"]
)
def test_a_wrong_setting_is_reported_before_weights_are_loaded(
    start: Callable[..., Engine], tmp_path: Path, environment: dict[str, str]
) -> None:
    """The directory contains no weights."""
    (tmp_path / "config.json").write_text(json.dumps(tiny.config()))
    extra = {} if environment else {"host_sze": "1GiB"}
    with pytest.raises(EngineError, match=r"(?is)host_sze.*did you mean.*host_size") as told:
        start(model=tmp_path, kv_transfer_config=kvloft(**extra), env=environment)
    assert "weights" not in str(told.value), "the error came only after weights were loaded"


def test_metrics_add_up(truth: Truth, start: Callable[..., Engine]) -> None:
    engine = start(kv_transfer_config=kvloft(), num_blocks=100)
    requests = [Req(random_ids(6100 + i, 90 + i), max_tokens=10) for i in range(5)]
    for _ in range(2):
        engine.ask(*[r.again() for r in requests])
    assert 'set "kv_load_failure_policy": "recompute"' in engine.tail(1 << 20), (
        "the default must be reported"
    )
    metrics, store = engine.metrics(), engine.store()
    loaded = metrics["vllm:kvloft_load_tokens_host_total"]
    assert loaded == metrics["vllm:external_prefix_cache_hits_total"] == 5 * 2 * BLOCK
    assert metrics["vllm:kvloft_saved_chunks_total"] == store["frames_visible"]
    assert metrics["vllm:kvloft_frames_total"] == store["frames_total"]
    assert metrics["vllm:kvloft_loaded_bytes_total"] * metrics[
        "vllm:kvloft_saved_chunks_total"
    ] == (metrics["vllm:kvloft_saved_bytes_total"] * loaded / BLOCK)
    for name in ("hook_errors", "verify_failures", "save_failed_chunks", "load_lost_blocks"):
        assert metrics[f"vllm:kvloft_{name}_total"] == 0, name


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_bench_can_take_the_connector_away_and_put_it_back(
    truth: Truth, start: Callable[..., Engine], async_scheduling: bool
) -> None:
    engine = start(kv_transfer_config=kvloft(), num_blocks=100, async_scheduling=async_scheduling)
    requests = [Req(random_ids(6200 + i, 3 * BLOCK + 7), max_tokens=4) for i in range(3)]

    def saved_and_loaded() -> tuple[float, float]:
        metrics = engine.metrics()
        return engine.store()["frames_visible"], metrics.get(
            "vllm:kvloft_load_tokens_host_total", 0
        )

    def ask(request: Req) -> None:
        assert engine.ask(request.again())[0].tokens == truth.tokens(request)

    ask(requests[0])
    ask(Req(random_ids(6300, 5), max_tokens=2))  # these steps complete the saves
    before = saved_and_loaded()
    assert before == (3, 0)
    running = Req(random_ids(6301, 5), max_tokens=10)
    engine.add(running)
    engine.step(2)
    with pytest.raises(EngineError, match="cannot be attached or detached"):
        engine.detach(away=True)
    engine.run()
    engine.detach(away=True)
    engine.reset()
    for request in requests[:2]:
        ask(request)
    engine.detach(away=False)
    assert saved_and_loaded() == before, "requests without the connector must not reach it"
    ask(requests[2])
    engine.reset()
    for request in requests:
        ask(request)
    assert saved_and_loaded()[1] == 2 * 3 * BLOCK, (
        "expected saves of the first and the last request, but not of the second"
    )
    engine.assert_at_rest()


def test_no_step_runs_while_a_connector_is_swapped(
    truth: Truth, start: Callable[..., Engine]
) -> None:
    """If the connector were detached during a step, the step's report would be lost. The step's
    saves would never complete, and vLLM would never free their blocks.
    """
    engine = start(kv_transfer_config=kvloft(), num_blocks=100, async_scheduling=True)
    num_free = engine.state()["free_blocks"]

    def until_done(request: Req) -> None:
        """Run steps like `LLM.generate`, which does not wait for a step in flight."""
        engine.add(request)
        while request.id not in engine.step(1):
            pass

    until_done(Req(random_ids(6400, 3 * BLOCK), max_tokens=3))
    assert engine.state()["busy"]
    engine.detach(away=True)
    assert not engine.state()["busy"]
    until_done(Req(random_ids(6401, 3 * BLOCK), max_tokens=3))
    assert engine.state()["busy"]
    engine.detach(away=False)
    assert not engine.state()["busy"]
    aborted = Req(random_ids(6402, 3 * BLOCK), max_tokens=30)
    engine.add(aborted)
    engine.step(3)
    engine.abort(aborted.id)
    engine.detach(away=True)
    running = Req(random_ids(6403, 3 * BLOCK), max_tokens=30)
    engine.add(running)
    engine.step(3)
    with pytest.raises(EngineError, match="cannot be attached or detached"):
        engine.detach(away=False)
    engine.abort(running.id)
    engine.run()
    engine.assert_at_rest()
    assert engine.reset() and engine.state()["free_blocks"] == num_free
    for request in truth.clear([Req(random_ids(6404 + i, 70), max_tokens=4) for i in range(2)]):
        assert engine.ask(request)[0].tokens == truth.tokens(request)
