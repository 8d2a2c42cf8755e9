"""The end of the long runs (soak.py, storm.py): counts in a file, problems in red, and an exit
status.
"""

import json
from pathlib import Path
from typing import Any

from rich.console import Console


def finish(console: Console, result: dict[str, Any], file: str | None) -> int:
    """``result["problems"]`` are sentences. Returns 1 if there are any."""
    if file:
        Path(file).write_text(json.dumps(result, indent=1))
    for problem in result["problems"]:
        console.print(f"kvloft: {problem}", style="red")
    return 1 if result["problems"] else 0
