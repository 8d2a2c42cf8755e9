"""A calibration as an engine would do at its start, on paged KV of one page size. It must not know how it is shown."""

import torch

from kvloft.bench.rig import Case
from kvloft.errors import UnsupportedError
from kvloft.transfer.cuda.calibrate import Calibration, measure
from kvloft.transfer.cuda.compile import default_cache_dir
from kvloft.transfer.cuda.kernels import Kernels
from kvloft.transfer.cuda.staging import RingSize
from kvloft.transfer.layout import PagedLayout, Plane


def calibration(page_bytes: int) -> Calibration:
    """Measured now, not taken from the cache. Raises UnsupportedError without a GPU."""
    if not torch.cuda.is_available():
        raise UnsupportedError("torch finds no NVIDIA GPU that it can use")
    case, num_blocks = Case.of(page_bytes), 8
    buffer = torch.zeros(case.block_bytes * num_blocks, dtype=torch.uint8, device="cuda")
    step = page_bytes * num_blocks
    planes = tuple(Plane(buffer.untyped_storage(), i * step, page_bytes, page_bytes, num_blocks) for i in range(case.num_planes))
    kernels = Kernels(PagedLayout(planes, num_blocks, bytes(32)), buffer.device, default_cache_dir() / "kernels")
    return measure(kernels, RingSize.of())
