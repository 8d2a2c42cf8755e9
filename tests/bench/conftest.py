"""Lets these tests import the emulated GPU of `tests/gpu`, and `benches`."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "gpu"), str(TESTS.parent)]
