"""Tests the Python bindings of the server and its client. The tests in rust/wire cover the behavior
of the server and the client.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloft import _core
from kvloft.errors import BusyError, ConfigError, StoreError

FRAME = 4096


@pytest.fixture
def socket() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:  # a socket path must be short
        yield str(Path(folder) / "run" / "kvloft.sock")


def connect(socket: str, **more: Any) -> _core.Session:
    return _core.Session.connect(
        socket, **{"frame_bytes": FRAME, "namespace": bytes(32), "timeout_s": 60.0} | more
    )


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def chain_of(tokens: list[int]) -> _core.KeyChain:
    chain = _core.KeyChain(bytes(32), block_tokens=1)
    chain.append_tokens(tokens)
    return chain


def test_sessions_of_one_server_share_and_each_holds_its_own(socket: str) -> None:
    server = _core.Server(socket, host_bytes=8 * FRAME)
    assert server.status()["namespaces"] == []
    one, other = connect(socket), connect(socket, description="here")
    assert one.arena_id == other.arena_id != 0
    arena = _core.Arena.open(other.arena_path, size_bytes=other.arena_sizes[0])
    assert (arena.id, other.arena_sizes[0]) == (one.arena_id, 8 * FRAME)
    (chunks,), _ = one.reserve([(chain_of([1, 2, 3]), (), 0, 0, 3, [[4, 5, 6]])])
    assert chunks is not None
    assert one.settle(chunks.tickets()) == (3, 0)
    lease = other.acquire(chain_of([1, 2, 3]))
    assert lease.poll() == (3, 0)
    batch, by_tier = lease.batch([[7, 8, 9]], 0, 3)
    assert (batch.block_ids(), by_tier) == ([7, 8, 9], {"host": 3})
    status = _core.server_status(socket)
    assert status == server.status() | {
        "namespaces": status["namespaces"],
        "stats": status["stats"],
    }
    (space,) = status["namespaces"]
    assert (space["namespace"], space["frame_sizes"], len(space["engines"])) == (
        bytes(32),
        [FRAME],
        2,
    )
    assert space["stats"]["pins"] == sum(engine["leases"] for engine in space["engines"]) * 3 == 3
    assert any("connected to namespace" in event for event in server.take_events())
    server.close()
    assert other.lookup(chain_of([1, 2, 3])) == (0, 0)
    assert lease.poll() == (0, 0)


def test_a_lookup_after_a_save_without_a_frame_is_not_counted(socket: str) -> None:
    """Look up chains as the scheduler side does: a chain is as long as in the save, and can extend
    beyond the saved units.
    """
    server = _core.Server(socket, host_bytes=8 * FRAME)
    engine, long, short = connect(socket), chain_of([]), chain_of([])

    def num_lookups() -> int:
        return int(server.status()["namespaces"][0]["stats"]["lookups"])

    rows = [
        (long, list(range(12)), 12, 0, 11, [list(range(1, 12))]),
        (short, [50, 51], 2, 0, 2, [[20, 21]]),
    ]
    (chunks, none), dropped = engine.reserve(rows)
    assert none is None
    assert (dropped, engine.settle(chunks.tickets())) == ([3, 2], (8, 0))
    assert [engine.lookup(chain)[0] for chain in (long, short)] == [8, 0]
    assert num_lookups() == 0
    assert [engine.lookup(chain)[0] for chain in (long, short)] == [8, 0]
    assert num_lookups() == 2, "a lookup for a request is counted"
    server.close()


def test_mistakes_have_the_errors_of_an_embedded_store(socket: str) -> None:
    with pytest.raises(StoreError, match="cannot connect to a kvloft server"):
        _core.server_status(socket)
    server = _core.Server(socket, host_bytes=8 * FRAME)
    with pytest.raises(BusyError, match="another kvloft server"):
        _core.Server(socket, host_bytes=8 * FRAME)
    engine = connect(socket)
    with pytest.raises(ConfigError, match=r"no namespace id starts with f;.*: 0000000000000000"):
        _core.server_clear(socket, namespace="f")
    with pytest.raises(ConfigError, match="lacks keys for some of the units"):
        engine.reserve([(chain_of([1]), (), 0, 0, 2, [[1, 2]])])
    assert repr(engine) == "Session(frame_sizes=[4096])"
    assert repr(server) == "Server(1 engines)"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"frame_bytes": 1 << 40},
            "--host-size of this engine's kvloft server = 32 KiB is too small for a chunk",
        ),
        ({"frame_bytes": 2 * FRAME}, "use the same settings for all engines"),
    ],
)
def test_an_engine_rejected_by_the_server_starts_without_the_cache(
    socket: str, settings: dict[str, int], said: str
) -> None:
    server = _core.Server(socket, host_bytes=8 * FRAME)
    first = connect(socket)
    engine = connect(socket, **settings)
    ((event, is_problem),) = engine.take_events()
    assert said in event
    assert is_problem
    assert event.endswith("running without the cache and retrying in the background")
    assert (engine.arena_path, engine.lookup(chain_of([1, 2, 3]))) == ("", (0, 0))
    assert first.arena_sizes[0] == 8 * FRAME
    server.close()


def test_a_session_without_a_server_has_no_arena_until_it_is_renewed(socket: str) -> None:
    engine = connect(socket)
    assert (engine.arena_path, engine.arena_id, engine.arena_sizes[0], engine.renew()) == (
        "",
        0,
        0,
        False,
    )
    server = _core.Server(socket, host_bytes=8 * FRAME)
    while not engine.renew():
        pass
    assert engine.arena_sizes[0] == 8 * FRAME
    assert not engine.renew()
    server.close()


FORKING_ENGINE = """
import os, signal
from kvloft import _core
session = _core.Session.connect(
    {socket!r}, frame_bytes={frame}, namespace=bytes(32), timeout_s=60.0
)
chain = _core.KeyChain(bytes(32), block_tokens=1)
chain.append_tokens([1, 2, 3])
session.reserve([(chain, (), 0, 0, 3, [[4, 5, 6]])])
if child := os.fork():
    print(child, flush=True)
else:
    os.close(1)
signal.pause()
"""


def test_a_forked_child_neither_hides_that_an_engine_died_nor_loses_it_its_frames(
    socket: str,
) -> None:
    """The child inherits the engine's connection and the arena mapping, so it can write to the
    engine's frames.
    """
    server = _core.Server(socket, host_bytes=8 * FRAME)
    code = FORKING_ENGINE.format(socket=socket, frame=FRAME)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None
        child = int(engine.stdout.readline())
        engine.kill()

    def state() -> tuple[int, int]:
        status = server.status()
        (space,) = status["namespaces"]
        return len(space["engines"]), status["stats"]["quarantined_reservations"]

    until(lambda: state() == (0, 3))
    time.sleep(1.0)  # longer than the time that the server waits for GPU copies
    assert state() == (0, 3)
    os.kill(child, signal.SIGKILL)
    until(lambda: state() == (0, 0))
    server.close()
