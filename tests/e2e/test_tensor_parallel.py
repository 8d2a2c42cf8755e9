"""Two ranks, each with its part of every frame: a chunk is found only when both saved it, and each loads its own part."""

from collections.abc import Callable
from pathlib import Path

from . import tiny
from .client import Engine, Req, Zygote, engine_kwargs, kvloft, random_ids, tokens_of
from .conftest import Truth


def test_two_ranks_save_and_load_their_parts_from_host_and_from_disk(
    zygote: Zygote, start: Callable[..., Engine], tmp_path: Path
) -> None:
    """Host memory holds eight chunks and the four requests have twelve: in the end some come from disk."""
    model = tiny.write_model(tmp_path / "model", num_heads=4, num_kv_heads=2)
    truth = Truth(lambda: zygote.engine(engine_kwargs(model)))
    requests = [truth.pick(lambda s: Req(random_ids(s, 100), max_tokens=20), 7000 + i) for i in range(4)]
    said = [truth.tokens(r) for r in requests]
    truth.close()
    settings = kvloft(tmp_path / "disk", host_size="448KiB")
    ranks = {"VLLM_CPU_OMP_THREADS_BIND": "0|0"}
    engine = start(kv_transfer_config=settings, model=model, tensor_parallel_size=2, env=ranks)
    assert engine.store()["frames_total"] == 8
    for num_external in (0, 96):
        results = engine.ask(*[r.again() for r in requests[:2]])
        assert tokens_of(results) == said[:2]
        assert [r.num_external for r in results] == [num_external] * 2
    assert tokens_of(engine.ask_each(*requests[2:])) == said[2:]
    assert tokens_of(engine.ask_each(*[r.again() for r in requests])) == said
    assert engine.metrics()["vllm:kvloft_load_tokens_disk_total"] > 0
    engine.assert_at_rest()
    engine.stop()
