"""`kvloft inspect` and `kvloft verify`: what a person and a script read, and the exit status on damage."""

import json
from pathlib import Path

import pytest

from kvloft import _core
from kvloft.cli.__main__ import main

FRAME = 4096
NAMESPACE = b"n" * 32
NUM_CHUNKS = 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A disk directory with five chunks."""
    fields = {"model": "'some/model'", "dtype": "torch.float32", "user": "''"}
    store = _core.Store(
        frame_bytes=FRAME,
        host_bytes=8 * FRAME,
        namespace=NAMESPACE,
        disk_path=str(tmp_path),
        disk_bytes=80 * FRAME,
        description=json.dumps(fields),
    )
    chain = _core.KeyChain(_core.root_key(NAMESPACE, None, None), block_tokens=1)
    chain.append_tokens(list(range(NUM_CHUNKS)))
    arena = _core.Arena.open(store.arena_path, frame_bytes=FRAME, num_frames=store.num_frames)
    rows, _ = store.reserve(chain, 0, NUM_CHUNKS)
    for _, frame, key, _, _ in rows:
        arena.seal(frame, offset=0, part_bytes=FRAME, key=key, layout=bytes(32), page_bytes=[64], num_blocks=1, rank=0)
    assert store.commit([row[0] for row in rows]) == NUM_CHUNKS
    assert store.flush(20)
    store.close()
    return tmp_path


def frames_file(folder: Path) -> Path:
    (path,) = folder.glob("*/frames.dat")
    return path


def damage_one_payload(folder: Path) -> None:
    """Flip one payload bit of the first slot that holds a chunk."""
    path = frames_file(folder)
    data = bytearray(path.read_bytes())
    at = next(i for i in range(0, len(data), FRAME) if data[i + FRAME - 128 : i + FRAME - 120] == b"KVLOFT01")
    data[at + 7] ^= 1
    path.write_bytes(data)


def test_inspect_shows_each_namespace_and_its_fields(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert NAMESPACE.hex()[:16] in out
    assert "model='some/model', dtype=torch.float32\n" in out


def test_inspect_json_is_for_scripts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--json", str(folder)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["namespace"], row["chunks"], row["frame_bytes"]) == (NAMESPACE.hex()[:16], NUM_CHUNKS, FRAME)


def test_verify_of_a_sound_directory_is_status_0(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder)]) == 0
    assert "no damage" in capsys.readouterr().out
    assert main(["verify", "--json", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out) == {"chunks": NUM_CHUNKS, "damage": []}


def test_verify_finds_one_flipped_bit_and_is_status_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage_one_payload(folder)
    assert main(["verify", "--json", str(folder)]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["damage"]) == 1
    assert shown["damage"][0]["namespace"] == NAMESPACE.hex()[:16]
    assert main(["verify", str(folder)]) == 1
    assert "1 damaged" in capsys.readouterr().out


def test_verify_of_a_truncated_file_is_status_1(folder: Path) -> None:
    path = frames_file(folder)
    path.write_bytes(path.read_bytes()[:FRAME])
    assert main(["verify", "--json", str(folder)]) == 1


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_wrong_directory_is_one_line_and_status_2(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(tmp_path / "nothing")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvloft: ")
    assert captured.err.count("\n") == 1
