"""Tests `prepare`, which compiles the kernels at startup, without a GPU."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils._python_dispatch import TorchDispatchMode

from kvloft.transfer.cuda import kernels, mover
from kvloft.transfer.layout import PagedLayout, Plane
from kvloft.transfer.movers import MoverSettings


class Operators(TorchDispatchMode):
    """Records all operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def test_prepare_does_not_allocate_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older releases of vLLM register KV caches inside the memory pool whose contents sleep mode
    discards.
    """
    idle = SimpleNamespace(synchronize=lambda: None)
    for name, value in (
        ("device", nullcontext()),
        ("current_stream", idle),
        ("get_device_capability", (9, 0)),
        ("get_device_name", "a GPU"),
        ("get_device_properties", SimpleNamespace(multi_processor_count=132)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(kernels, "compile_kernels", lambda *_, **__: b"")
    monkeypatch.setattr(kernels.driver, "load_functions", lambda _, names: dict.fromkeys(names, 0))
    storage: Any = SimpleNamespace(device=torch.device("meta"), data_ptr=lambda: 1 << 20)
    layout = PagedLayout((Plane(storage, 0, 8192, 8192, 4, is_bf16=True),), 4, bytes(32))
    with Operators() as operators:
        mover.prepare([layout], [1], MoverSettings())
    assert operators.names == []
