"""Tests `kvloft inspect` and `kvloft verify`: their output for users and for scripts, and the exit
status if chunks are damaged.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from batches import reserve

from kvloft import _core
from kvloft.cli import inspect
from kvloft.cli.__main__ import main

PACE = float(os.environ.get("TEST_PACE", "1"))
FRAME = 4096
NAMESPACE = b"n" * 32
NUM_CHUNKS = 5
OLDER_SUPERBLOCK = json.dumps(
    {
        "format": 1,
        "frame_bytes": FRAME,
        "namespace": NAMESPACE.hex(),
        "description": "older",
        "checksum": "99e6f29cb29b9aaa",
    }
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a disk directory with five chunks."""
    fields = {"model": "'some/model'", "dtype": "torch.float32", "user": "''"}
    store = _core.Session(
        frame_bytes=FRAME,
        host_bytes=8 * FRAME,
        namespace=NAMESPACE,
        disk_path=str(tmp_path),
        disk_bytes=80 * FRAME,
        description=json.dumps(fields),
    )
    chain = _core.KeyChain(_core.root_key(NAMESPACE, None, None), block_tokens=1)
    chain.append_tokens(list(range(NUM_CHUNKS)))
    arena = _core.Arena.open(store.arena_path, size_bytes=store.arena_sizes[0])
    rows, _ = reserve(store, chain, 0, NUM_CHUNKS)
    for _, frame, key, _ in rows:
        part = {
            "offset": frame * FRAME,
            "part_bytes": FRAME,
            "key": key,
            "layout": bytes(32),
            "page_bytes": [64],
            "num_blocks": 1,
            "rank": 0,
        }
        arena.seal(part)
    assert store.settle([row[0] for row in rows])[0] == NUM_CHUNKS
    assert store.flush(60.0 * PACE)
    store.close()
    return tmp_path


def frames_file(folder: Path) -> Path:
    (path,) = folder.glob("*/frames-*.dat")
    return path


def damage_one_payload(folder: Path) -> None:
    """Flip one payload bit of the first slot that holds a chunk."""
    path = frames_file(folder)
    data = bytearray(path.read_bytes())
    at = next(
        i
        for i in range(0, len(data), FRAME)
        if data[i + FRAME - 128 : i + FRAME - 120] == b"KVLOFT03"
    )
    data[at + 7] ^= 1
    path.write_bytes(data)


def test_a_long_list_of_damage_is_truncated_with_a_note(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvloft.cli.verify.MAX_ROWS", 2)
    frames_file(folder).write_bytes(b"")
    assert main(["verify", str(folder)]) == 1
    out = capsys.readouterr().out
    assert f"and {NUM_CHUNKS - 2} more" in out
    assert out.count("file is too short") == 2


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_folders_of_other_data_parallel_engines_are_named(
    folder: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("dp1", "dp12", "dpx", "other"):
        (folder / name).mkdir()
    assert main([command, str(folder)]) == 0
    assert "which were not read: dp1, dp12;" in capsys.readouterr().err
    assert main([command, str(folder / "dp1")]) == 2
    (folder / "other" / "dp1").mkdir()
    assert main([command, str(folder / "other")]) == 2
    assert "which were not read: dp1;" in capsys.readouterr().err


def test_a_problem_that_is_gone_a_moment_later_was_an_engine_at_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, looks = _core.disk_inspect, [2]

    def look(path: str) -> list[dict[str, Any]]:
        found = real(path)
        looks[0] -= 1
        return [{**found[0], "problem": "half written"}] if looks[0] >= 0 else found

    monkeypatch.setattr(_core, "disk_inspect", look)
    assert main(["inspect", str(folder), "--json"]) == 0
    assert "half written" not in capsys.readouterr().out
    looks[0] = 9
    assert main(["inspect", str(folder), "--json"]) == 0
    assert "half written" in capsys.readouterr().out


def test_inspect_shows_each_namespace_and_its_fields(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert NAMESPACE.hex()[:16] in out
    assert "model='some/model', dtype=torch.float32\n" in out


@pytest.mark.parametrize("description", ["[" * 100_000, "{", "[]", ""])
def test_a_foreign_description_has_no_fields(description: str) -> None:
    assert inspect._fields(description) is None


def test_inspect_json_is_for_scripts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--json", str(folder)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["namespace"], row["chunks"], row["frame_sizes"]) == (
        NAMESPACE.hex()[:16],
        NUM_CHUNKS,
        [FRAME],
    )
    assert row["fields"]["dtype"] == "torch.float32"


def test_verify_of_a_sound_directory_is_status_0(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(folder)]) == 0
    assert "no damage" in capsys.readouterr().out
    assert main(["verify", "--json", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "chunks": NUM_CHUNKS,
        "damage": [],
        "other_format": [],
    }


def test_verify_finds_one_flipped_bit_and_is_status_1(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage_one_payload(folder)
    assert main(["verify", "--json", str(folder)]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["damage"]) == 1
    assert shown["damage"][0]["namespace"] == NAMESPACE.hex()[:16]
    assert 0 <= shown["damage"][0]["slot"] < NUM_CHUNKS, "the slot is a number"
    assert main(["verify", str(folder)]) == 1
    assert "1 damaged" in capsys.readouterr().out


def test_verify_of_a_truncated_file_is_status_1(folder: Path) -> None:
    path = frames_file(folder)
    path.write_bytes(path.read_bytes()[:FRAME])
    assert main(["verify", "--json", str(folder)]) == 1


@pytest.mark.parametrize(
    ("num_bytes", "says"),
    [(None, "index-4096.dat is missing"), (0, "index-4096.dat is empty")],
)
def test_verify_of_a_lost_index_is_status_1(
    folder: Path, capsys: pytest.CaptureFixture[str], num_bytes: int | None, says: str
) -> None:
    index = frames_file(folder).with_name("index-4096.dat")
    index.unlink()
    if num_bytes is not None:
        index.write_bytes(bytes(num_bytes))
    assert main(["verify", "--json", str(folder)]) == 1
    (damage,) = json.loads(capsys.readouterr().out)["damage"]
    assert damage["problem"].startswith(says) and (damage["slot"], damage["key"]) == (None, None)
    assert main(["verify", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "0 chunks checked: 1 problem found." in out
    assert main(["inspect", "--json", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["problem"] == damage["problem"]


@pytest.mark.parametrize("is_json", [False, True])
def test_damage_is_status_1_if_the_reader_closes_early(folder: Path, is_json: bool) -> None:
    damage_one_payload(folder)
    argv = [
        sys.executable,
        "-m",
        "kvloft.cli",
        "verify",
        str(folder),
        *(["--json"] if is_json else []),
    ]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        environ = os.environ | {"PYTHONUNBUFFERED": "1"}  # simulates a large output
        done = subprocess.run(
            argv, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, env=environ
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_output_error_is_not_the_status_of_damage(folder: Path) -> None:
    argv = [sys.executable, "-m", "kvloft.cli", "verify", str(folder)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (
        4,
        "kvloft: cannot write the output (No space left on device)\n",
    )


def make_older(folder: Path) -> None:
    """Replace the superblock of the directory with a valid superblock of the first format."""
    path = frames_file(folder).with_name("superblock.json")
    path.write_text(OLDER_SUPERBLOCK)


def test_verify_of_an_older_format_is_status_3_with_an_explanation(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_older(folder)
    assert main(["verify", str(folder)]) == 3
    out = capsys.readouterr().out
    assert "no damage" in out
    assert f"{NAMESPACE.hex()[:16]} was not checked: superblock.json is in format 1" in out
    assert "clears the namespace" in out
    assert main(["verify", "--json", str(folder)]) == 3
    shown = json.loads(capsys.readouterr().out)
    assert (shown["chunks"], shown["damage"], len(shown["other_format"])) == (0, [], 1)
    assert main(["inspect", "--json", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["problem"] == shown["other_format"][0]["problem"]
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    assert (
        "3 no damage, but some namespaces were written by a different kvloft version"
        in " ".join(capsys.readouterr().out.split())
    )


def test_a_format_that_is_a_flipped_digit_is_damage(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = frames_file(folder).with_name("superblock.json")
    path.write_text(path.read_text().replace('"format": 4', '"format": 5'))
    assert main(["verify", "--json", str(folder)]) == 1
    problem = json.loads(capsys.readouterr().out)["damage"][0]["problem"]
    assert "its checksum does not match" in problem


def test_damage_with_an_older_format_is_status_1(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_older(folder)
    (folder / "00112233445566aa").mkdir()
    assert main(["verify", "--json", str(folder)]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (len(shown["damage"]), len(shown["other_format"])) == (1, 1)


def test_verify_of_a_directory_in_use_is_one_helpful_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = _core.Session(
        frame_bytes=FRAME,
        host_bytes=8 * FRAME,
        namespace=NAMESPACE,
        disk_path=str(tmp_path),
        disk_bytes=1 << 20,
    )
    assert main(["verify", str(tmp_path)]) == 2
    store.close()
    assert capsys.readouterr().err == (
        f"kvloft: {tmp_path} is in use by process {os.getpid()}: stop it and verify again, "
        "or use `kvloft inspect`, which works while it runs\n"
    )
    assert main(["verify", str(tmp_path)]) == 0, "an empty directory is not damaged"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "does not exist"),
        ("x" * 300, "cannot be opened (File name too long (os error 36))"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_wrong_directory_is_one_line_and_status_2(
    command: str, name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path / name)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    said = f"kvloft: {tmp_path / name} {why}: DIR must be an engine's or server's disk_path\n"
    assert captured.err == said


def test_a_lock_that_cannot_be_opened_is_no_setting_of_verify(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "lock").unlink()
    (folder / "lock").symlink_to("elsewhere")
    assert main(["verify", str(folder)]) == 2
    assert capsys.readouterr().err.startswith(f"kvloft: cannot open the lock file in {folder}: ")


@pytest.mark.parametrize(
    "description", ["\x1b[2Jmodel", json.dumps({"model": "\x1b]0;title\x07", "\x9b": "\n"})]
)
def test_control_characters_in_a_description_are_escaped(description: str) -> None:
    shown = inspect.describe(description)
    assert shown.isprintable()
    assert "\\x" in shown
