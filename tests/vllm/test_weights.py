"""Tests how loaded weights are identified by files, links and commits.

If the weights cannot be identified, the cache is valid only for this run.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvloft.vllm.identity import weights
from kvloft.vllm.identity.weights import (
    FILE_FORMATS,
    engine_start_s,
    hub_commit,
    look,
    model_fields,
)

LONG_AGO = (1_000_000_000, 1_000_000_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the directory of a model whose files are older than the engine."""
    model = tmp_path / "model"
    (model / "whisper").mkdir(parents=True)
    for name in (
        "config.json",
        "modeling_x.py",
        "model.safetensors",
        "model.safetensors.index.json",
        "whisper/a.safetensors",
    ):
        (model / name).write_bytes(name.encode() * 30_000)
    return model


@pytest.fixture(autouse=True)
def _the_engine_starts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.time() + 3600
    monkeypatch.setattr(weights, "engine_start_s", lambda: start)


def fields(
    model: str,
    *,
    commit: str | None = None,
    load_format: str = "auto",
    config: Any = None,
    **more: Any,
) -> dict[str, Any]:
    settings = config or {}
    hf_config = SimpleNamespace(_commit_hash=commit, to_dict=lambda: settings)
    config = SimpleNamespace(**{"model": model, "revision": None, "hf_config": hf_config} | more)
    return model_fields(
        config, SimpleNamespace(load_format=load_format, download_dir=more.get("download_dir"))
    )


def is_shared(model: str, **more: Any) -> bool:
    return fields(model, **more) == fields(model, **more)


def rewrite(path: Path, at: int, byte: bytes = b"\1") -> None:
    """Replace the content but keep the size and the time, as `cp -p` and rsync do."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(byte)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: rewrite(model / "model.safetensors", 200_000),
        lambda model: rewrite(model / "modeling_x.py", 0),
        lambda model: (model / "model.safetensors.index.json").write_text("{}"),
        lambda model: (model / "config.json").write_text("{}"),
        lambda model: (model / "whisper" / "a.safetensors").write_text("other"),
        lambda model: (model / "another.weights").write_text("of a pattern that the user gave"),
        lambda model: (model / "model.safetensors").rename(model / "model.bin"),
        lambda model: (model / "config.json").unlink(),
    ],
)
def test_any_file_that_changed_is_another_model(
    folder: Path, change: Callable[[Path], object]
) -> None:
    first = fields(str(folder))
    assert first == fields(str(folder)) and first["unknown_weights"] is None
    change(folder)
    assert fields(str(folder))["weights"] != first["weights"]


def test_hidden_files_are_left_out(folder: Path) -> None:
    first = fields(str(folder))
    (folder / ".git").mkdir()
    (folder / ".git" / "index").write_text("x")
    assert fields(str(folder)) == first


def test_a_file_is_a_model_too(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("one")
    (tmp_path / "neighbor").write_text("x")
    first = fields(str(tmp_path / "model.gguf"), load_format="gguf")
    (tmp_path / "neighbor").write_text("y")
    assert fields(str(tmp_path / "model.gguf"), load_format="gguf") == first
    (tmp_path / "model.gguf").write_text("two")
    assert fields(str(tmp_path / "model.gguf"), load_format="gguf") != first


def relink(link: Path, to: Path) -> None:
    link.unlink()
    link.symlink_to(to)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: (model / "model.safetensors").write_text("trained further"),
        lambda model: rewrite(model / "model.safetensors", 5),
        lambda model: (model / "model.safetensors").rename(model / "other"),
        lambda model: (model.rename(model.parent / "was"), (model.parent / "was").rename(model)),
        lambda model: relink(model.parent / "current", model),
        lambda model: (
            (model.parent / "other" / "sub").mkdir(parents=True)
            or relink(model / "linked", model.parent / "other")
        ),
        lambda model: relink(model.parent / "step", model.parent),
        lambda model: (
            model.parent.rename(model.parent.parent / "was"),
            (model.parent.parent / "was").rename(model.parent),
        ),
    ],
)
def test_files_changed_since_start_are_valid_for_this_run_only(
    folder: Path, change: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch, logged: Any
) -> None:
    (folder.parent / "step").symlink_to(folder.parent)
    (folder.parent / "current").symlink_to(folder.parent / "step" / "model")
    (folder / "linked").symlink_to(folder / "whisper")
    before = look(str(folder.parent / "current"))
    assert before is not None
    time.sleep(0.05)  # longer than the resolution of file timestamps
    monkeypatch.setattr(weights, "engine_start_s", lambda: before.latest_s + 0.01)
    assert is_shared(str(folder.parent / "current")) and not logged()
    change(folder)
    assert not is_shared(str(folder.parent / "current"))
    assert "changed after the engine started" in logged()[0].getMessage()


@pytest.mark.parametrize(
    "name",
    ["hub/name", "/no/such/folder", "./models/a/b", "s3://bucket/model", "x" * 5000, "~no-user/x"],
)
def test_unidentified_weights_are_valid_for_this_run_only(name: str) -> None:
    """The model could come from a different hub, and the name does not show whether it was trained
    further.
    """
    assert not is_shared(name)
    assert is_shared(name, commit="abc")
    assert not is_shared(name, commit="abc", hf_config_path="hub/other"), (
        "the commit belongs to the configuration"
    )
    assert is_shared(name, load_format="dummy")


@pytest.mark.parametrize("load_format", ["tensorizer", "of_a_plugin"])
def test_weights_from_anywhere_serve_this_run_only(folder: Path, load_format: str) -> None:
    assert not is_shared(str(folder), load_format=load_format)
    assert all(is_shared(str(folder), load_format=known) for known in FILE_FORMATS)
    assert not is_shared(str(folder), model_weights="s3://bucket")


def test_a_model_that_loads_another_one_serves_this_run_only(folder: Path) -> None:
    assert is_shared(str(folder), config={"text_model_id": None})
    assert not is_shared(str(folder), config={"text_model_id": "hub/text"})


def test_code_from_another_repository_serves_this_run_only() -> None:
    code = {"auto_map": {"AutoModel": "hub/name--modeling.Model"}}
    assert is_shared("hub/name", commit="abc", config=code)
    assert not is_shared("hub/fine-tuned", commit="abc", config=code)
    several = {"auto_map": {"AutoTokenizer": ["hub/name--tokenizer.Slow", None]}}
    assert is_shared("hub/name", commit="abc", config=several)
    assert is_shared("hub/name", commit="abc", config={"auto_map": "odd"})


def test_odd_files_are_neither_an_error_nor_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "pytorch_model.pth")
    (folder / "optimizer.pt").mkdir()
    (folder / "pytorch_model.bin").symlink_to("nowhere")
    (folder / "loop").symlink_to(folder)
    (folder / "unreadable.bin").write_text("x")
    (folder / "unreadable.bin").chmod(0)
    with open(os.path.join(os.fsencode(folder), b"\xff.bin"), "w") as file:
        file.write("x")
    assert is_shared(str(folder))


def test_a_folder_below_that_cannot_be_listed_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, lost+found at the root of a volume cannot be listed."""
    listed = os.listdir

    def listdir(path: bytes) -> list[bytes]:
        if path.endswith(b"whisper"):
            raise PermissionError
        return listed(path)

    monkeypatch.setattr(os, "listdir", listdir)
    assert is_shared(str(folder))


def test_a_link_back_is_followed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "latest").symlink_to(folder)
    monkeypatch.setattr(weights, "MAX_ENTRIES", 9)
    assert is_shared(str(folder))


def test_too_many_files_are_not_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_ENTRIES", 7)
    assert is_shared(str(folder))
    (folder / "one more").touch()
    assert look(str(folder)) is None
    assert not is_shared(str(folder))


@pytest.mark.parametrize(("file", "revision"), [("config.json", None), ("params.json", "v2")])
def test_a_configuration_without_a_commit_has_that_of_the_hubs_cache(
    hub_cache: Any, file: str, revision: str | None
) -> None:
    """Covers Mistral's format, which does not use the configuration classes of transformers."""
    hub_cache("hub/name", file, "c0ffee", revision or "main")
    assert fields("hub/name", revision=revision) == fields(
        "hub/name", commit="c0ffee", revision=revision
    )
    hub_cache("hub/name", file, "decade", revision or "main")
    assert fields("hub/name", revision=revision)["commit"] == "decade"


def test_another_hub_is_not_in_this_hubs_cache(
    hub_cache: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub_cache("hub/name", "config.json", "c0ffee")
    assert hub_commit("hub/name") == "c0ffee"
    assert hub_commit("hub/name", cache_dir=str(tmp_path / "elsewhere")) is None
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "true")
    assert hub_commit("hub/name") is None


def test_a_damaged_cache_is_no_error(hub_cache: Any, tmp_path: Path) -> None:
    hub_cache("hub/name", "config.json", "c0ffee")
    (tmp_path / "models--hub--name" / "refs" / "main").write_bytes(b"\xff")
    assert hub_commit("hub/name") is None


def test_the_engines_start_is_exact_to_a_tick() -> None:
    code = (
        "import time; t = time.time(); from kvloft.vllm.identity.weights import engine_start_s, "
        "note_start; "
    )
    code += (
        "s = engine_start_s(); note_start(); r = engine_start_s(); note_start(); print(t, s, r, "
        "engine_start_s())"
    )
    before = time.time()
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    begun, start, registered, again = map(float, out.split()[-4:])
    assert before - 0.02 <= start <= begun
    assert start < registered == again, "only the first time is used: later times may follow a load"


def test_without_proc_every_file_may_be_newer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(weights, "engine_start_s", engine_start_s)
    monkeypatch.setattr(weights, "_registered_s", 0.0)
    monkeypatch.setattr(weights.Path, "read_text", unreadable)
    assert engine_start_s() == 0.0
    assert not is_shared(str(folder))
