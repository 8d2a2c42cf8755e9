"""Shared by all tests: hypothesis profiles, and a guard that the installed wheel is what is being tested."""

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


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own KVLOFT_* must not change what a test sees."""
    for name in list(os.environ):
        if name.startswith("KVLOFT_"):
            monkeypatch.delenv(name)
