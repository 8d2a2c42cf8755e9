"""Makes test helpers importable and skips GPU tests on machines without a GPU."""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "model")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests on machines without a GPU. With NEED_GPU=1, the tests fail instead."""
    mine = [item for item in items if item.get_closest_marker("gpu")]
    if not mine or os.environ.get("NEED_GPU") == "1":
        return
    try:
        import torch

        reason = None if torch.cuda.is_available() else "no CUDA device"
    except ImportError:
        reason = "torch is not installed"
    if reason is not None:
        for item in mine:
            item.add_marker(
                pytest.mark.skip(
                    reason=f"GPU test: {reason}; run scripts/gpu_check.sh on a GPU machine"
                )
            )
