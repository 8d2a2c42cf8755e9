"""Makes the symbolic engine in this directory and the model store importable."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "model"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
