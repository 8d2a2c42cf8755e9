"""Lets these tests import the emulated GPU of `tests/gpu`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))
