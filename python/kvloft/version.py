"""The version and git revision of this build. Cargo.toml defines the version."""

from typing import Final

from kvloft._core import REVISION, VERSION

__all__ = ["BUILD", "BUILD_INFO_HELP", "BUILD_LABELS", "VERSION"]

BUILD: Final = f"{VERSION} ({REVISION})"
BUILD_INFO_HELP: Final = "Version and git revision of kvloft; the value is always 1."
BUILD_LABELS: Final = {"version": VERSION, "revision": REVISION}
