"""Lets these tests import the paged KV beside them, and the models of `tests/model`."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "model")]
