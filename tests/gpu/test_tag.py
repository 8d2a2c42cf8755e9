"""Checks that the GPU and CPU implementations compute the same tag."""

import ctypes
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from kernels_oracle import VECTORS, chunk_tag, mix

SHIM = """
#define __device__
#define __forceinline__ inline
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return ((unsigned long long)high << 32 | low) >> (by & 31);
}
#include "tag.cuh"
using kvloft::u64;
extern "C" u64 device_mix(u64 x) { return kvloft::mix(x); }
extern "C" u64 device_position(u64 page, u64 word) { return kvloft::tag_position(page, word); }
"""


def device_source() -> Path:
    return Path(str(resources.files("kvloft") / "csrc" / "tag.cuh"))


def test_device_constants_are_the_golden_ones() -> None:
    found = re.findall(r"\bkTag(\w+) = 0x([0-9a-f]+)ull", device_source().read_text())
    assert dict(found) == VECTORS["constants"]


@pytest.mark.parametrize("case", VECTORS["cases"], ids=[case["name"] for case in VECTORS["cases"]])
def test_oracle_makes_the_golden_tags(case: dict) -> None:
    payload = np.frombuffer(bytes.fromhex(case["payload"]), np.uint8)
    assert chunk_tag(payload, case["page_bytes"], case["num_blocks"]) == int(case["tag"], 16)


def test_device_code_compiled_for_the_cpu_mixes_as_the_oracle(tmp_path: Path) -> None:
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    assert compiler is not None, "this test needs a C++ compiler"
    library = tmp_path / "tag.so"
    command = [
        compiler,
        "-x",
        "c++",
        "-std=c++17",
        "-shared",
        "-fPIC",
        f"-I{device_source().parent}",
        "-o",
        str(library),
        "-",
    ]
    subprocess.run(command, input=SHIM, text=True, check=True)
    device = ctypes.CDLL(str(library))
    device.device_mix.restype = device.device_position.restype = ctypes.c_uint64
    noise = np.random.default_rng(1).integers(0, 2**64, 1000, dtype=np.uint64)
    words = np.concatenate(
        [noise, np.uint64(1) << np.arange(64, dtype=np.uint64), np.zeros(1, np.uint64)]
    )
    assert [device.device_mix(ctypes.c_uint64(int(word))) for word in words] == mix(words).tolist()
    for page, word in ((0, 0), (1, 0), (0, 1), (3, 2**20), (2**32, 7)):
        a, b, c = (int(VECTORS["constants"][name], 16) for name in "ABC")
        assert (
            device.device_position(ctypes.c_uint64(page), ctypes.c_uint64(word))
            == (page * a + word * b + c) % 2**64
        )
