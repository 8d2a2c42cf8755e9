"""Makes the helpers in this directory and in `tests/model` importable, and defines shared
fixtures.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
for folder in (str(HERE), str(HERE.parent / "model")):
    if folder not in sys.path:
        sys.path.insert(0, folder)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that puts a file into a Hugging Face cache, as if ``name`` had been
    downloaded at ``commit``.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def put(name: str, file: str, commit: str, revision: str = "main") -> None:
        repo = tmp_path / f"models--{name.replace('/', '--')}"
        for folder in (repo / "refs", repo / "snapshots" / commit):
            folder.mkdir(parents=True, exist_ok=True)
        (repo / "refs" / revision).write_text(commit)
        (repo / "snapshots" / commit / file).write_text("{}")

    return put
