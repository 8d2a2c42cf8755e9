"""Reports a long run's result (for example, soak.py's): writes counters to a file, prints problems
in red, and returns an exit status.
"""

import json
from pathlib import Path
from typing import Any

from rich.console import Console


def finish(console: Console, result: dict[str, Any], file: str | None) -> int:
    """Print the report and return the exit status, which is 1 if ``result["problems"]`` is not
    empty.
    """
    if file:
        Path(file).write_text(json.dumps(result, indent=1))
    for problem in result["problems"]:
        console.print(f"kvloft: {problem}", style="red")
    return 1 if result["problems"] else 0
