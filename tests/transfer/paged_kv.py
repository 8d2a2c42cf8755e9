"""Paged KV in the layouts of vLLM's releases. The location of a block's bytes is computed only from
element addresses.

This module is the oracle for layouts and movers. The oracle does not use planes: the bytes of a
block are the bytes of its elements in address order. This module must not import kvloft.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC")


@dataclass(frozen=True)
class Sizes:
    """The logical sizes of an engine's paged KV."""

    layers: int = 3
    blocks: int = 7
    heads: int = 2
    tokens: int = 5
    content: int = 6
    dtype: torch.dtype = torch.float16

    def of(self, axis: str) -> int:
        return {
            "L": self.layers,
            "B": self.blocks,
            "H": self.heads,
            "N": self.tokens,
            "C": self.content,
        }[axis]


def carve(order: str, sizes: Sizes, *, offset: int = 0) -> dict[str, torch.Tensor]:
    """Allocate one storage for all layers, in physical ``order``, and return a view [B, H, N, C]
    per layer.
    """
    shape = [sizes.of(axis) for axis in order]
    raw = random_bytes((offset + math.prod(shape)) * sizes.dtype.itemsize).view(sizes.dtype)
    whole = raw[offset:].view(shape).permute([order.index(axis) for axis in "LBHNC"])
    return {f"layer.{i}": whole[i] for i in range(sizes.layers)}


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))


def storage_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return all bytes of the tensor's storage, without copying."""
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return flat.numpy()


def block_addresses(tensor: torch.Tensor, num_blocks: int, block: int) -> np.ndarray:
    """Return the byte positions in the storage of all elements of one block, in ascending order."""
    ratio = tensor.shape[0] // num_blocks
    positions = np.zeros(1, dtype=np.int64) + tensor.storage_offset()
    for dim, (count, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        index = np.arange(block * ratio, (block + 1) * ratio) if dim == 0 else np.arange(count)
        positions = (positions[:, None] + index[None, :] * stride).reshape(-1)
    size = tensor.element_size()
    return np.sort((positions[:, None] * size + np.arange(size)[None, :]).reshape(-1))


def block_bytes(caches: Mapping[str, torch.Tensor], num_blocks: int, block: int) -> bytes:
    """Return a block's content in all layers. Each memory range is included once."""
    seen: set[tuple[int, int]] = set()
    parts: list[bytes] = []
    for tensor in caches.values():
        addresses = block_addresses(tensor, num_blocks, block)
        place = (tensor.untyped_storage().data_ptr(), int(addresses[0]))
        if place not in seen:
            seen.add(place)
            parts.append(storage_bytes(tensor)[addresses].tobytes())
    return b"".join(parts)


def snapshot(caches: Mapping[str, torch.Tensor]) -> dict[int, np.ndarray]:
    """Return a copy of every storage, keyed by address."""
    return {t.untyped_storage().data_ptr(): storage_bytes(t).copy() for t in caches.values()}


def untouched(
    caches: Mapping[str, torch.Tensor],
    before: Mapping[int, np.ndarray],
    num_blocks: int,
    written: Sequence[int],
) -> bool:
    """Return True if all bytes outside the blocks ``written`` are unchanged."""
    for place, old in before.items():
        tensors = [t for t in caches.values() if t.untyped_storage().data_ptr() == place]
        same = storage_bytes(tensors[0]) == old
        for tensor in tensors:
            for block in written:
                same[block_addresses(tensor, num_blocks, block)] = True
        if not same.all():
            return False
    return True
