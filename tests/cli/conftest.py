"""Makes the models in `tests/model` and the helpers in this directory importable, and starts a
server for the tests.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvloft import _core
from kvloft.cli import metrics

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "model"), str(HERE)]


@pytest.fixture
def socket() -> Iterator[str]:
    """Start a server with one engine that has saved three chunks, and return its socket."""
    from watched import save  # importable only after the change to `sys.path` above

    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        path = f"{folder}/run/kv.sock"
        with closing(
            _core.Server(path, host_bytes=1 << 20, disk_path=f"{folder}/disk", disk_bytes=1 << 20)
        ) as server:
            engine = _core.Session.connect(
                path, frame_bytes=4096, namespace=bytes(32), timeout_s=60.0
            )
            save(engine, [1, 2, 3])
            _, end = metrics.serve(("127.0.0.1", 0), server.status)
            end()
            yield path
            engine.close()
