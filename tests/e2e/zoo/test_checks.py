"""Runs `kvloft check` on the tiny models and compares the results with docs/models.md."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from e2e.client import Zygote

from .checking import NOT_SERVED, ROOT, check
from .models import IS_WHOLE, RARE, ZOO

WITHOUT_GROUPS = (
    [name for name, model in sorted(ZOO.items()) if len(model.kinds) > 1] if IS_WHOLE else ["lfm2"]
)
"""Models with multiple groups, which are also checked with kv_groups=one."""
TRIED = [
    *((name, "auto") for name in sorted(ZOO) if IS_WHOLE or name not in RARE),
    *((name, "one") for name in WITHOUT_GROUPS),
]

pytestmark = pytest.mark.spread


@pytest.fixture(scope="module", autouse=True)
def _release(vllm_release: tuple[int, int]) -> None:
    if vllm_release != (0, 32):
        pytest.skip("the zoo's models require vLLM 0.32")


@pytest.mark.parametrize(("name", "kv_groups"), TRIED)
def test_a_model_is_supported_or_the_reason_is_reported(
    name: str, kv_groups: str, zygote: Zygote, tmp_path: Path
) -> None:
    if name == "deepseek-v2" and "amx_tile" in Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM computes MLA models differently on CPUs with AMX, which is untested")
    status, report, progress = check(name, tmp_path, kv_groups, zygote)
    assert not any(one["wrong"] for one in report["passes"])
    if (name, kv_groups) in NOT_SERVED:
        assert status == 1
        assert report["missing"][0].startswith("vLLM did not run with kvloft: ")
        assert [one["name"] for one in report["passes"]] == ["plain", "own"]
    else:
        assert status == 0, (report["missing"], progress)
    assert_is_on_the_page(report)


def assert_is_on_the_page(report: dict[str, Any]) -> None:
    spec = importlib.util.spec_from_file_location(
        "models_table", ROOT / "scripts" / "models_table.py"
    )
    assert spec is not None and spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    found = f"| {' | '.join(table.row(report))} |"
    page = table.PAGE.read_text()
    assert found in page or not table.is_shown(report), (
        "docs/models.md is outdated; CONTRIBUTING.md describes how to update it"
    )
