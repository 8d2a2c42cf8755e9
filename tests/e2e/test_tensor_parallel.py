"""Tests two ranks, each with a shard of every frame. A lookup finds a chunk only after both ranks
have saved it, and each rank loads its shard.
"""

from collections.abc import Callable
from pathlib import Path

from . import tiny
from .client import Engine, Req, Zygote, engine_kwargs, kvloft, random_ids
from .conftest import Truth


def test_two_ranks_save_and_load_their_parts_from_host_and_from_disk(
    zygote: Zygote, start: Callable[..., Engine], tmp_path: Path
) -> None:
    model = tiny.write_model(tmp_path / "model", num_heads=4, num_kv_heads=2)
    truth = Truth(lambda: zygote.engine(engine_kwargs(model)))
    requests = [
        truth.pick(lambda s: Req(random_ids(s, 100), max_tokens=20), 7000 + i) for i in range(2)
    ]
    ranks = {"VLLM_CPU_OMP_THREADS_BIND": "0|0"}
    for life in range(2):
        engine = start(
            kv_transfer_config=kvloft(tmp_path / "disk"),
            model=model,
            tensor_parallel_size=2,
            env=ranks,
        )
        for turn in range(2):
            results = engine.ask(*[r.again() for r in requests])
            assert [r.tokens for r in results] == [truth.tokens(r) for r in requests]
            assert [r.num_external for r in results] == [96 if life or turn else 0] * 2
        engine.stop()
    truth.close()
