"""Makes `benches`, the emulated GPU in `tests/gpu` and the models in `tests/model` importable."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "gpu"), str(TESTS / "model"), str(TESTS.parent)]
