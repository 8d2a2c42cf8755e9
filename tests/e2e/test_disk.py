"""Tests the disk tier with real engines.

A restarted engine finds its chunks. Damage, foreign files and kill -9 cause misses but never a
wrong token.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from . import tiny
from .cache_server import of_own_store
from .client import Engine, Req, Zygote, engine_kwargs, full_blocks, kvloft, random_ids
from .conftest import Truth

PROMPTS = [Req(random_ids(3000 + i, 150 + 7 * i), max_tokens=12) for i in range(6)]


def ask_all(truth: Truth, engine: Engine) -> int:
    """Run every prompt, check its tokens, and return the number of external tokens."""
    results = engine.ask(*[p.again() for p in PROMPTS])
    assert [r.tokens for r in results] == [truth.tokens(p) for p in PROMPTS]
    return sum(r.num_external for r in results)


def fill(truth: Truth, start: Callable[..., Engine], folder: Path) -> int:
    """Run all prompts cold with a disk at ``folder``, stop the engine, and return the number of
    tokens in a full hit.
    """
    engine = start(kv_transfer_config=kvloft(folder), num_blocks=120)
    assert ask_all(truth, engine) == 0
    engine.stop()
    return sum(full_blocks(p.num_prompt_tokens) for p in PROMPTS)


def the_file(folder: Path, name: str) -> Path:
    (path,) = folder.glob(f"*/{name}")
    return path


def test_a_restart_finds_the_disk_tier(
    truth: Truth, start: Callable[..., Engine], tmp_path: Path
) -> None:
    full = fill(truth, start, tmp_path)
    for _ in range(2):
        engine = start(kv_transfer_config=kvloft(tmp_path), num_blocks=120)
        assert ask_all(truth, engine) == full
        assert engine.metrics()["vllm:kvloft_load_tokens_disk_total"] == full
        assert ask_all(truth, engine) == full
        assert engine.metrics()["vllm:kvloft_load_tokens_host_total"] == full
        engine.assert_at_rest()
        engine.stop()


def test_a_host_tier_smaller_than_the_working_set_is_refilled_from_disk(
    truth: Truth, start: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = start(kv_transfer_config=kvloft(tmp_path, host_size="640KiB"), num_blocks=120)
    for _ in range(3):
        for prompt in PROMPTS:
            assert engine.ask(prompt.again())[0].tokens == truth.tokens(prompt)
    metrics = engine.metrics()
    assert metrics["vllm:kvloft_host_evictions_total"] > 0
    assert metrics["vllm:kvloft_load_tokens_disk_total"] > 0
    engine.assert_at_rest()


def used(data: NDArray[np.uint8]) -> int:
    """Return the number of bytes up to the last nonzero byte. The file itself always has the tier's
    maximum size.
    """
    return int(np.flatnonzero(data)[-1]) + 1


def damage_frames(folder: Path) -> None:
    path = the_file(folder, "frames-*.dat")
    data = np.fromfile(path, dtype=np.uint8)
    data[::997] ^= 4
    data.tofile(path)


def damage_some_frames(folder: Path) -> None:
    path = the_file(folder, "frames-*.dat")
    data = np.fromfile(path, dtype=np.uint8)
    data[used(data) // 3 :][:100] ^= 255
    data.tofile(path)


def swap_frames(folder: Path) -> None:
    """Rotate the contents of all used frames, so that each frame holds another frame's chunk and
    checksum.
    """
    (frame_bytes,) = json.loads(the_file(folder, "superblock.json").read_text())["frame_sizes"]
    path = the_file(folder, "frames-*.dat")
    data = np.fromfile(path, dtype=np.uint8)
    whole = data[: len(data) // frame_bytes * frame_bytes].reshape(-1, frame_bytes)
    used = np.flatnonzero(whole.any(axis=1))
    whole[used] = whole[np.roll(used, 1)]
    data.tofile(path)


def truncate_frames(folder: Path) -> None:
    path = the_file(folder, "frames-*.dat")
    with path.open("r+b") as file:
        file.truncate(used(np.fromfile(path, dtype=np.uint8)) // 3)


def damage_index(folder: Path) -> None:
    path = the_file(folder, "index-*.dat")
    data = np.fromfile(path, dtype=np.uint8)
    data[40::200] ^= 16
    data.tofile(path)


def truncate_index(folder: Path) -> None:
    path = the_file(folder, "index-*.dat")
    with path.open("r+b") as file:
        file.truncate(used(np.fromfile(path, dtype=np.uint8)) // 2 + 13)


def replace_superblock(folder: Path) -> None:
    the_file(folder, "superblock.json").write_text("not json")


def add_foreign_files(folder: Path) -> None:
    (folder / "README").write_text("not kvloft's")
    (folder / "0123456789abcdef").mkdir()
    (folder / "0123456789abcdef" / "frames.dat").write_bytes(b"x" * 12345)
    (the_file(folder, "index-*.dat").parent / "frames-1.dat.tmp").write_bytes(b"y" * 99)


@pytest.mark.parametrize(
    ("damage", "least", "most"),
    [
        (damage_frames, 0, 0),
        (damage_some_frames, 1, 99),
        (swap_frames, 0, 0),
        (truncate_frames, 0, 99),
        (damage_index, 0, 99),
        (truncate_index, 0, 99),
        (replace_superblock, 0, 99),
        (add_foreign_files, 100, 100),
    ],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_damage_costs_misses_and_never_a_token(
    truth: Truth,
    start: Callable[..., Engine],
    tmp_path: Path,
    damage: Callable[[Path], None],
    least: int,
    most: int,
) -> None:
    full = fill(truth, start, tmp_path)
    damage(tmp_path)
    engine = start(kv_transfer_config=kvloft(tmp_path), num_blocks=120)
    found = ask_all(truth, engine)
    assert least * full <= 100 * found <= most * full, "hit out of range (percent of a full hit)"
    if damage in (damage_frames, damage_some_frames, swap_frames):
        metrics = engine.metrics()
        assert (
            metrics["vllm:kvloft_disk_verify_failures_total"]
            + metrics["vllm:kvloft_verify_failures_total"]
            > 0
        )
    assert ask_all(truth, engine) == full, "the engine did not replace the damaged chunks"
    engine.assert_at_rest()
    engine.stop()
    again = start(kv_transfer_config=kvloft(tmp_path), num_blocks=120)
    assert ask_all(truth, again) == full, "the damaged chunks on disk were not replaced"


@pytest.mark.parametrize("steps", [1, 3, 6, 10, 20])
def test_kill_9_during_saves_leaves_no_wrong_token(
    truth: Truth, start: Callable[..., Engine], tmp_path: Path, steps: int
) -> None:
    engine = start(kv_transfer_config=kvloft(tmp_path), num_blocks=120, max_num_batched_tokens=64)
    engine.add(*[p.again() for p in PROMPTS])
    engine.step(steps)
    engine.kill()
    again = start(kv_transfer_config=kvloft(tmp_path), num_blocks=120)
    found = ask_all(truth, again)
    assert found <= sum(full_blocks(p.num_prompt_tokens) for p in PROMPTS)
    again.assert_at_rest()
    again.kill()
    last = start(kv_transfer_config=kvloft(tmp_path), num_blocks=120)
    assert ask_all(truth, last) >= found


@of_own_store
def test_a_second_engine_on_one_disk_directory_has_host_memory_until_the_first_ends(
    truth: Truth, start: Callable[..., Engine], tmp_path: Path
) -> None:
    first = start(kv_transfer_config=kvloft(tmp_path))
    assert first.ask(PROMPTS[0].again())[0].tokens == truth.tokens(PROMPTS[0])
    first.flush()
    second = start(kv_transfer_config=kvloft(tmp_path), num_blocks=120)
    assert second.ask(PROMPTS[1].again())[0].tokens == truth.tokens(PROMPTS[1])
    assert second.log.read_text().count("host memory only") == 1
    assert f"in use by process {first.pid}" in second.log.read_text()
    first.kill()
    second.wait_for_disk()
    result = second.ask(PROMPTS[0].again())[0]
    assert (result.tokens, result.num_external) == (
        truth.tokens(PROMPTS[0]),
        full_blocks(PROMPTS[0].num_prompt_tokens),
    )


def test_another_model_finds_nothing_of_this_one(
    truth: Truth,
    start: Callable[..., Engine],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    from . import tiny

    fill(truth, start, tmp_path)
    other = tiny.write_model(tmp_path_factory.mktemp("other"), seed=77)
    engine = start(kv_transfer_config=kvloft(tmp_path), num_blocks=120, model=other)
    results = engine.ask(*[p.again() for p in PROMPTS])
    assert sum(r.num_external for r in results) == 0
    assert [r.tokens for r in results] != [truth.tokens(p) for p in PROMPTS]


def test_weights_replaced_in_a_running_engine_are_neither_served_nor_kept(
    zygote: Zygote, truth: Truth, start: Callable[..., Engine], tmp_path: Path
) -> None:
    """vLLM does not notify connectors of new weights, so the namespace still identifies the first
    weights.
    """
    other = tiny.write_model(tmp_path / "other", seed=99)
    others = Truth(lambda: zygote.engine(engine_kwargs(other, num_blocks=200)))
    known, new = PROMPTS[:2]
    engine = start(kv_transfer_config=kvloft(tmp_path / "disk"), num_blocks=120)
    assert engine.ask(known.again())[0].tokens == truth.tokens(known) != others.tokens(known)
    engine.reload(other)
    assert engine.reset()
    assert [r.tokens for r in engine.ask(known.again(), new.again())] == [
        others.tokens(known),
        others.tokens(new),
    ]
    engine.stop()
    engine = start(kv_transfer_config=kvloft(tmp_path / "disk"), num_blocks=120)
    assert [r.tokens for r in engine.ask(known.again(), new.again())] == [
        truth.tokens(known),
        truth.tokens(new),
    ]
    assert engine.metrics()["vllm:kvloft_load_tokens_disk_total"] == full_blocks(
        known.num_prompt_tokens
    )
    others.close()
