"""Tests workers that outlive their killed EngineCore and still write to its frames. No other engine
may use these frames, and no token may be wrong.
"""

from pathlib import Path

import pytest

from . import orphans
from .client import Zygote

STEP_S = 4.0
"""Duration of a step, longer than any grace period after which a server might free the frames."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_frames_of_a_killed_engine_stay_reserved_while_its_workers_write_to_them(
    zygote: Zygote, tmp_path: Path, ranks: int
) -> None:
    with orphans.scene(zygote, tmp_path, ranks) as scene:
        other = scene.engine()
        found = orphans.orphan(scene, other, 20_000, STEP_S)
        assert not found["problems"]
        assert found["stored"] == found["reserved"] * ranks > 0, (
            "the workers must write to every frame after their scheduler dies"
        )
        assert other.metrics()["vllm:kvloft_verify_failures_total"] == 0
        other.assert_at_rest()
