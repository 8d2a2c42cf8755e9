"""Makes the emulated GPU of `tests/gpu`, the models of `tests/model` and `benches` importable."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "gpu"), str(TESTS / "model"), str(TESTS.parent)]
