"""Checks that the cache survives calls that cannot change the weights (introspection, pauses,
sleep), and that kvloft does not use the cache after other calls.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .client import BLOCK, Engine, Req, full_blocks, kvloft, random_ids
from .conftest import Truth

REQUEST = Req(random_ids(7000, 5 * BLOCK + 3), max_tokens=6)
FULL = full_blocks(REQUEST.num_prompt_tokens)


def hit(truth: Truth, engine: Engine) -> int:
    result = engine.ask(REQUEST.again())[0]
    assert result.tokens == truth.tokens(REQUEST)
    return result.num_external


@pytest.mark.short
def test_introspection_ends_nothing(
    truth: Truth, start: Callable[..., Engine], vllm_release: tuple[int, int]
) -> None:
    engine = start(kv_transfer_config=kvloft())
    assert [hit(truth, engine) for _ in range(2)] == [0, FULL]
    assert "LlamaForCausalLM" in engine.print()
    for method in (
        "synchronize_device",
        "get_encoder_timing_stats",
        "check_health",
        "reset_mm_cache",
    ):
        engine.rpc(method)
    if vllm_release >= (0, 32):
        engine.rpc("compute_weight_checksums")
        engine.rpc("release_late_interaction_query_cache", [])
    assert hit(truth, engine) == FULL
    assert "caching is disabled" not in engine.tail(1 << 20)
    engine.rpc("get_model")
    assert hit(truth, engine) == 0, "code that receives the model can change it"
    assert "get_model may have replaced the weights" in engine.tail(1 << 20)


PAUSES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "pause": [("pause_scheduler", {"clear_cache": True}), ("resume_scheduler", {})],
    "sleep": [("sleep", {"level": 1}), ("wake_up", {})],
    "sleep that throws weights away": [("sleep", {"level": 2}), ("wake_up", {})],
}


@pytest.mark.parametrize(
    ("name", "extra", "kept"),
    [
        pytest.param("pause", {}, True, marks=pytest.mark.short),
        ("sleep", {}, True),
        ("pause", {"on_pause": "clear"}, False),
        ("sleep", {"on_pause": "clear"}, False),
        ("sleep that throws weights away", {}, False),
    ],
)
def test_a_pause_leaves_both_tiers_alone_unless_weights_go(
    truth: Truth,
    start: Callable[..., Engine],
    tmp_path: Path,
    name: str,
    extra: dict[str, Any],
    kept: bool,
) -> None:
    engine = start(kv_transfer_config=kvloft(tmp_path, **extra))
    assert [hit(truth, engine) for _ in range(2)] == [0, FULL]
    for method, kwargs in PAUSES[name]:
        engine.core(method, **kwargs)
    assert hit(truth, engine) == FULL * kept
    for method, kwargs in PAUSES[name]:
        engine.core(method, **kwargs)
    engine.stop()
    again = start(kv_transfer_config=kvloft(tmp_path, **extra))
    assert hit(truth, again) == FULL * kept
    again.assert_at_rest()


@pytest.mark.short
def test_a_users_reset_clears_after_a_pause_too(truth: Truth, start: Callable[..., Engine]) -> None:
    engine = start(kv_transfer_config=kvloft())
    hit(truth, engine)
    for connector, expected in ((False, FULL), (True, 0)):
        engine.core("pause_scheduler", clear_cache=True)
        engine.core("resume_scheduler")
        assert engine.reset(connector=connector)
        assert hit(truth, engine) == expected
