"""Engine sleep: copies in flight end before vLLM unmaps the paged KV that they read and write.

vLLM asks no connector before it sleeps, and waits only for what is on the GPU already, not for what kvloft still has to send; a
kernel on unmapped pages would end the engine. So the allocator's own methods that unmap are wrapped, once a process.
"""

from __future__ import annotations

import logging
from functools import wraps
from typing import Any, Protocol
from weakref import WeakSet

logger = logging.getLogger("vllm.kvloft")

UNMAPPING = ("sleep", "discard")
"""Methods of vLLM's CuMemAllocator; ``discard`` is not in every release."""


class Drains(Protocol):
    """Something with copies in flight."""

    def drain(self) -> None: ...


_waiting: WeakSet[Any] = WeakSet()


def drain_before_sleep(core: Drains, allocator: Any = None) -> None:
    """Have ``core.drain()`` called before anything is unmapped, for as long as ``core`` lives.

    ``allocator`` is vLLM's one (None) or a test's. Raises AttributeError or ImportError where this vLLM's is another.
    """
    if allocator is None:
        from vllm.device_allocator.cumem import CuMemAllocator

        allocator = CuMemAllocator.get_instance()
    _waiting.add(core)
    for name in UNMAPPING:
        method = getattr(allocator, name, None) if name != "sleep" else allocator.sleep
        if method is not None and not hasattr(method, "kvloft_drains"):
            setattr(allocator, name, _drained(method))


def _drained(method: Any) -> Any:
    @wraps(method)
    def unmapping(*args: Any, **kwargs: Any) -> Any:
        for core in list(_waiting):
            try:
                core.drain()
            except Exception:
                logger.exception("kvloft: copies in flight could not be waited for before memory is unmapped")
        return method(*args, **kwargs)

    unmapping.kvloft_drains = True  # type: ignore[attr-defined]
    return unmapping
