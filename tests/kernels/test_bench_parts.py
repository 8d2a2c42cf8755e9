"""What a first token's time is made of, around a model of torch's on the emulated GPU. Needs no GPU."""

from itertools import chain, repeat
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from emulated_gpu import Gpu, emulated

from kvloft.bench import parts
from kvloft.bench.parts import ForwardParts
from kvloft.transfer.cuda import lanes


class Model(torch.nn.Module):
    """A forward of 7 commands."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def forward(self) -> None:
        for _ in range(7):
            self.gpu.compute.enqueue(lambda: None)


def test_the_gpus_part_is_from_the_first_forward_to_the_end_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated(1) as gpu:
        monkeypatch.setattr(parts, "driver", lanes.driver)
        clock = chain([0.0, 10.0, 10.5, 20.0, 20.25], repeat(30.0))
        monkeypatch.setattr(parts, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
        model = Model(gpu)
        around = ForwardParts(model, lambda: gpu.compute)
        with pytest.raises(RuntimeError, match="0 forwards"):
            around.take(1.0)
        for _ in range(2):  # two requests
            around.start()
            for _ in range(3):
                model()
                gpu.compute.enqueue(lambda: None)  # sampling
            found = around.take(100.0)
            # An event counts what ran before it: behind the first event 3 forwards, 2 of sampling, 3 events at ends, 2 at begins.
            assert found.gpu_s == 3 * 7 + 2 + 3 + 2
            assert found.between_s == 2 * 2, "a command of sampling, and the event"
            assert found.before_s in (0.5, 0.25)
            assert found.before_s + found.gpu_s + found.after_s == 100.0
        around.start()
        for _ in range(parts.MAX_FORWARDS + 1):
            model()
        with pytest.raises(RuntimeError, match=f"{parts.MAX_FORWARDS + 1} forwards"):
            around.take(100.0)
        around.start()
        around.close()
        model()
        with pytest.raises(RuntimeError, match="0 forwards"):
            around.take(100.0)
