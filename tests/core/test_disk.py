"""Tests `kvloft inspect` and `kvloft verify` on intact and damaged directories of a real store."""

import json
import os
import time
from pathlib import Path

import pytest
from batches import reserve

from kvloft import _core
from kvloft.cli.__main__ import main
from kvloft.cli.inspect import format_time
from kvloft.config.units import size_text

PACE = float(os.environ.get("TEST_PACE", "1"))
FRAME = 4096
NAMESPACE = bytes(range(32))
NUM_CHUNKS = 5


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Return the directory of a closed store that contains a chain of chunks."""
    store = _open_store(tmp_path / "disk")
    chain = _core.KeyChain(_core.root_key(NAMESPACE, None, None), block_tokens=1)
    chain.append_tokens(list(range(NUM_CHUNKS)))
    rows, dropped = reserve(store, chain, 0, NUM_CHUNKS)
    assert (len(rows), dropped) == (NUM_CHUNKS, 0)
    assert store.settle([row[0] for row in rows])[0] == NUM_CHUNKS
    assert store.flush(60.0 * PACE)
    store.close()
    return tmp_path / "disk"


def _open_store(path: Path) -> _core.Session:
    return _core.Session(
        frame_bytes=FRAME,
        host_bytes=16 * FRAME,
        namespace=NAMESPACE,
        disk_path=str(path),
        disk_bytes=1 << 20,
        description="a small model",
    )


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_inspect_shows_written_chunks(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(disk), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["namespace"] == NAMESPACE[:8].hex()
    assert (found["description"], found["chunks"], found["frame_sizes"]) == (
        "a small model",
        NUM_CHUNKS,
        [FRAME],
    )
    assert found["problem"] is None
    assert 0 < found["oldest"] <= found["newest"]
    assert main(["inspect", str(disk)]) == 0
    assert NAMESPACE[:8].hex() in capsys.readouterr().out


def test_inspect_works_and_verify_is_busy_while_an_engine_owns_the_directory(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = _open_store(disk)
    assert main(["inspect", str(disk), "--json"]) == 0
    capsys.readouterr()
    assert main(["verify", str(disk)]) == 2
    assert "in use" in capsys.readouterr().err
    store.close()


def test_verify_of_a_sound_directory_is_silent_and_zero(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(disk), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "chunks": NUM_CHUNKS,
        "damage": [],
        "other_format": [],
    }
    assert main(["verify", str(disk)]) == 0
    assert "no damage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "offset", "problem"),
    [
        (f"frames-{FRAME}.dat", 2 * FRAME + 9, "its checksum does not match"),
        (f"index-{FRAME}.dat", 128 + 20, "its record is damaged"),
    ],
)
def test_verify_finds_a_flipped_bit_and_exits_1(
    disk: Path, capsys: pytest.CaptureFixture[str], name: str, offset: int, problem: str
) -> None:
    _flip(disk / NAMESPACE[:8].hex() / name, offset)
    assert main(["verify", str(disk), "--json"]) == 1
    (damage,) = json.loads(capsys.readouterr().out)["damage"]
    assert damage["namespace"] == NAMESPACE[:8].hex()
    assert (damage["slot"], damage["frame_bytes"], damage["problem"]) == (
        offset // (FRAME if name.startswith("frames") else 128),
        FRAME,
        problem,
    )
    assert main(["verify", str(disk)]) == 1
    assert "1 damaged" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_folder_that_is_no_disk_directory_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        assert main([command, str(path)]) == 2
        assert str(path) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_sizes_and_times_are_for_people() -> None:
    assert [size_text(n) for n in (0, 1023, 1024, 5 << 29, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "2.5 GiB",
        "3 TiB",
    ]
    assert format_time(None) == "-"
    assert format_time(2**63) == "-"
    assert format_time(1_700_000_000).startswith("2023-11-1")
    assert len(format_time(1_700_000_000)) == 10
    assert len(format_time(int(time.time()))) == len("21 Nov 12:30")
