"""Runs `kvloft check` as a user would, without forking engines from the zygote. zoo/test_checks.py
covers all tiny models.
"""

from pathlib import Path

import pytest

from .zoo.checking import check


def test_a_model_with_windows_is_served_with_all_groups(
    tmp_path: Path, vllm_release: tuple[int, int]
) -> None:
    if vllm_release < (0, 32):
        pytest.skip("vLLM before 0.32 does not support connectors with multiple KV cache groups")
    status, report, progress = check("gemma3", tmp_path, "all")
    assert status == 0, (report, progress)
    passes = {one["name"]: one for one in report["passes"]}
    assert all(one["equal"] == one["answers"] for one in passes.values())
    assert passes["host"]["host"] == passes["disk"]["disk"] == passes["own"]["cached"]
    *windows, full = passes["disk"]["blocks"]
    assert 0 < min(windows) <= max(windows) < full, (
        "must load as many blocks with windows as with full attention"
    )
    assert report["engines"]["alone"]["blocks"] == report["engines"]["with kvloft"]["blocks"]
