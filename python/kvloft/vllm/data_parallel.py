"""The disk directories of data-parallel engines."""

from pathlib import Path
from typing import Any

from kvloft.config.table import Config


def disk_path_of(config: Config, parallel: Any) -> str | None:
    """Return the directory of this data-parallel engine: ``disk_path`` for the first engine, and
    ``dpN`` in it for others.

    Only the index identifies the engine: engines of a dense model are independent, and vLLM resets
    their size to 1 and their rank to 0 (`reconfigure_for_independent_dp_rank`).
    """
    index = getattr(parallel, "data_parallel_index", None)
    rank = parallel.data_parallel_rank if index is None else index
    if config.disk_path is None or rank == 0:
        return config.disk_path
    return str(Path(config.disk_path) / f"dp{rank}")
