"""The tag on the GPU is the tag on the CPU: one definition, written down twice, held together here."""

from importlib import resources

import numpy as np
from kernels_oracle import TAG_RS, chunk_tag, tag_constants


def test_device_and_rust_constants_agree() -> None:
    device = tag_constants((resources.files("kvloft") / "csrc" / "tag.cuh").read_text())
    rust = tag_constants(TAG_RS.read_text())
    assert device == rust
    assert set(device) == {"A", "B", "C", "M1", "M2"}


def test_oracle_makes_the_golden_tags_of_the_rust_core() -> None:
    payload = np.arange(256, dtype=np.uint8)
    assert chunk_tag(payload, [256], 1) == 0xFBDC8C44C240FDE6
    assert chunk_tag(payload, [64], 4) == 0xB42FC555211F20B3
    assert chunk_tag(payload, [100, 28], 2) == 0xAB1F09EF54734709
