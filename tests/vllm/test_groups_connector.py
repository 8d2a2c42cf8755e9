"""Tests how KVLoftGroupsConnector reports failed loads, with one KV cache group and with multiple
groups.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from kvloft.vllm.connector import KVLoftGroupsConnector


@pytest.fixture(autouse=True)
def _release(vllm_release: tuple[int, int]) -> None:
    if vllm_release < (0, 32):
        pytest.skip("vLLM before 0.32 does not support multiple groups with connectors")


@pytest.mark.parametrize("fails_requests", [True, False])
def test_bad_blocks_are_reported_by_id_only_with_one_group(
    fails_requests: bool,
) -> None:
    """With one group, a block id identifies the missing tokens, and vLLM recomputes the tokens
    starting at this block. With multiple groups, vLLM recomputes all tokens.
    """
    bad = {5, 6}

    def take_bad_blocks() -> set[int]:
        taken = set(bad)
        bad.clear()
        return taken

    connector: Any = object.__new__(KVLoftGroupsConnector)
    core = SimpleNamespace(failed_loads={"b"})
    connector._worker = SimpleNamespace(
        fails_requests=fails_requests,
        core=core,
        take_finished=lambda: {"a", "b"},
        take_bad_blocks=take_bad_blocks,
    )
    results = connector.get_transfer_results(set())
    assert results.finished_recving == {"a", "b"}
    assert set(getattr(results, "failed_recving", ()) or ()) == ({"b"} if fails_requests else set())
    assert connector.get_block_ids_with_load_errors() == (set() if fails_requests else {5, 6})


def test_bad_blocks_of_a_running_load_are_not_reported_with_several_groups() -> None:
    """The worker detects bad blocks chunk by chunk, before the load is complete.

    Reporting bad blocks of multiple groups would crash the engine.
    """
    connector: Any = object.__new__(KVLoftGroupsConnector)
    bad = {5}

    def take_bad_blocks() -> set[int]:
        taken = set(bad)
        bad.clear()
        return taken

    core = SimpleNamespace(failed_loads=set())
    connector._worker = SimpleNamespace(
        fails_requests=True, core=core, take_finished=set, take_bad_blocks=take_bad_blocks
    )
    results = connector.get_transfer_results(set())
    assert not results.finished_recving
    assert connector.get_block_ids_with_load_errors() == set()
