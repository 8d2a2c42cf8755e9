"""Divides the paged KV in the registered tensors into planes of equally spaced pages.

A page is a run of opaque bytes. In each plane, the page of block b starts at
``base + b * block_stride``. Data pointers and strides define the geometry. Shapes are not
sufficient: the CPU backend packs K and V differently from CUDA, dimension 0 can count kernel
blocks, and layers can share memory.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvloft.errors import UnsupportedError


class LayoutError(UnsupportedError):
    """kvloft cannot divide the paged KV of this attention backend into pages."""


@dataclass(frozen=True, slots=True)
class Plane:
    """The pages of one layer, or of one head in a layer.

    Page b is ``page_bytes`` long and starts at ``base + b * block_stride``. ``storage`` keeps the
    memory alive, and ``offset`` is the byte offset of ``base`` in ``storage``. If ``is_bf16`` is
    True, the pages hold bfloat16 values, which can be compressed.
    """

    storage: torch.UntypedStorage
    offset: int
    block_stride: int
    page_bytes: int
    num_blocks: int
    is_bf16: bool = False

    @property
    def base(self) -> int:
        return self.storage.data_ptr() + self.offset


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """All planes in payload order. A block's payload is the concatenation of its pages."""

    planes: tuple[Plane, ...]
    num_blocks: int
    digest: bytes

    @property
    def page_bytes(self) -> tuple[int, ...]:
        return tuple(plane.page_bytes for plane in self.planes)

    @property
    def block_bytes(self) -> int:
        return sum(plane.page_bytes for plane in self.planes)


def read_layout(
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    num_blocks: int,
    fingerprint: str = "",
) -> PagedLayout:
    """Return the planes of all registered layers, in registration order.

    Layers that share memory also share planes. The digest covers ``fingerprint`` (dtype, backend,
    version) and the geometry inside pages, so that loads reject frames with any other layout.
    Raises LayoutError if a tensor cannot be divided into pages.
    """
    planes: dict[tuple[int, int], Plane] = {}
    digest = hashlib.blake2b(fingerprint.encode(), digest_size=32)
    tensors = [  # a Mamba layer has more than one tensor
        (name, tensor)
        for name, given in kv_caches.items()
        for tensor in ([given] if isinstance(given, torch.Tensor) else given)
    ]
    for name, tensor in tensors:
        if tensor.numel() == 0:
            raise LayoutError(
                f"layer {name!r} has an empty KV tensor, which kvloft does not support"
            )
        for plane in _planes_of(name, tensor, num_blocks):
            if planes.setdefault((plane.base, plane.page_bytes), plane) is not plane:
                continue
            inner = (tensor.dtype, tuple(tensor.shape[1:]), _dense_order(tensor), plane.page_bytes)
            digest.update(repr(inner).encode())
    if not planes:
        raise LayoutError("the engine registered no KV tensors, so there is nothing to cache")
    return PagedLayout(tuple(planes.values()), num_blocks, digest.digest())


def without_pages(other: PagedLayout) -> PagedLayout:
    """Return the layout of a KV cache group that has no layers on this rank.

    ``other`` is the layout of any other group.
    """
    return PagedLayout((), other.num_blocks, hashlib.blake2b(b"no pages", digest_size=32).digest())


def _dense_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the inner dimensions in memory order, which differs between NHD and HND pages."""
    dims = [d for d in range(1, tensor.dim()) if tensor.shape[d] > 1]
    return tuple(sorted(dims, key=lambda d: -tensor.stride(d)))


def _planes_of(name: str, tensor: torch.Tensor, num_blocks: int) -> list[Plane]:
    """Split a layer's tensor into planes of dense pages.

    A dimension whose stride spans all blocks (K and V, or heads) is split into separate planes. The
    dimensions inside a page must be dense, so that a page is one run of bytes.
    """
    if tensor.shape[0] % num_blocks:
        raise LayoutError(
            f"layer {name!r} has a KV tensor of shape {tuple(tensor.shape)}, whose first dimension "
            f"is not a multiple of the number of blocks ({num_blocks}); kvloft does not support "
            "the layout of this attention backend"
        )
    if tensor.shape[0] != num_blocks:
        tensor = tensor.unflatten(0, (num_blocks, -1))
    size = tensor.element_size()
    block_stride = tensor.stride(0)
    outer = [
        d
        for d in range(1, tensor.dim())
        if tensor.shape[d] > 1 and tensor.stride(d) >= block_stride * num_blocks
    ]
    inner = [d for d in range(1, tensor.dim()) if d not in outer and tensor.shape[d] > 1]
    span = 1
    for dim in sorted(inner, key=tensor.stride):
        if tensor.stride(dim) != span:
            raise LayoutError(
                f"layer {name!r} has KV pages that are not contiguous (shape "
                f"{tuple(tensor.shape)}, strides {tensor.stride()}); kvloft does not support the "
                "layout of this attention backend"
            )
        span *= tensor.shape[dim]
    if num_blocks > 1 and block_stride < span:
        raise LayoutError(
            f"layer {name!r} has overlapping KV pages (strides {tensor.stride()}), which kvloft "
            "does not support"
        )
    storage = tensor.untyped_storage()
    start = tensor.data_ptr() - storage.data_ptr()
    offsets = [0]
    for dim in outer:
        offsets = [o + i * tensor.stride(dim) for o in offsets for i in range(tensor.shape[dim])]
    is_bf16 = tensor.dtype == torch.bfloat16
    return [
        Plane(storage, start + o * size, block_stride * size, span * size, num_blocks, is_bf16)
        for o in offsets
    ]
