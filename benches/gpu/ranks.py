"""`python -m benches.gpu.ranks`: checks tensor-parallel and pipeline-parallel engine outputs.

Outputs must be the same with and without loads from host memory. Each rank compares loaded bytes
with the bytes its forward passes wrote. The engine uses vLLM's batch-invariant mode, as in
`equality`, and no CUDA graphs. This module does not import vLLM.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benches.gpu.child import CHILD_ENV, can_run, end_of, result_of, start, verdict
from benches.gpu.engine import shared_gpu
from benches.gpu.options import STATUS, add_model, add_sizes, table_of
from benches.gpu.shapes import options_of
from kvloft.bench.command import console, whole, write

ENV = {
    **CHILD_ENV,
    "VLLM_BATCH_INVARIANT": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""The engine's environment variables.

Ranks are forked, so that they inherit the child's patches to kvloft. All-reduces use plain NCCL,
because NVLink multicast can disturb other programs on the host's GPUs.
"""


def run(*, options: dict[str, Any], log: Path, timeout_s: float) -> dict[str, Any]:
    """Run the child and return its result, with the key "error" if it failed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        asked = json.dumps({**options, "model_dir": f"{folder}/model"})
        status = end_of(start(log, "ranks_child", asked, env=ENV), timeout_s)
    return result_of(log, status)


def problems(result: Mapping[str, Any], num_ranks: int) -> Iterator[str]:
    """Yield the reasons why the check fails."""
    if "error" in result:
        yield str(result["error"])
        return
    runs = result["runs"]
    cold, warm, crowd, skipped = (runs[name] for name in ("cold", "warm", "crowd", "skipped_load"))
    for name in ("hbm", "warm", "crowd"):
        if runs[name]["tokens"][: len(cold["tokens"])] != cold["tokens"]:
            yield f"tokens in {name} differ from the tokens in cold"
    if runs["crowd_warm"]["tokens"] != crowd["tokens"]:
        yield "tokens in crowd_warm differ from the tokens in crowd"
    if missing := [
        n
        for n, found in enumerate(runs["crowd_warm"]["cached"][len(cold["tokens"]) :])
        if not found
    ]:
        yield f"crowd_warm: no cached tokens for some of the prompts that crowd computed: {missing}"
    for name in ("crowd", "crowd_warm"):
        if any(
            ours < before
            for ours, before in zip(runs[name]["cached"], warm["cached"], strict=False)
        ):
            yield (
                f"fewer cached tokens in {name} than in warm: {runs[name]['cached']}, expected "
                f"{warm['cached']}"
            )
    if skipped["tokens"] == cold["tokens"]:
        yield "tokens do not depend on the loaded KV"
    if any(
        ours < theirs - 16
        for ours, theirs in zip(warm["cached"], runs["hbm"]["cached"], strict=True)
    ):
        yield (
            f"fewer cached tokens than with vLLM's own cache: {warm['cached']}, expected "
            f"{runs['hbm']['cached']}"
        )
    for name, found in runs.items():
        if len(found["ranks"]) != num_ranks:
            yield f"{name}: {len(found['ranks'])} ranks responded, expected {num_ranks}"
    for name in ("warm", "crowd", "crowd_warm"):
        for rank, found in enumerate(runs[name]["ranks"]):
            if (
                not found["loaded"]
                or found["loaded_differing"]
                or found["unknown"]
                or found.get("bad_chunks")
            ):
                yield (
                    f"{name}: rank {rank} loaded nothing, or loaded pages that differ from the "
                    f"computed pages: {found}"
                )
    for rank, blind in enumerate(skipped["ranks"]):
        if not blind["loaded"] or blind["loaded_differing"] != blind["loaded"]:
            yield f"rank {rank}: the audit did not detect skipped loads: {blind}"


def table(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the header and one row per run."""
    runs = result.get("runs", {})
    known = runs.get("crowd", runs.get("cold", {})).get("tokens", [])
    rows: list[tuple[str, ...]] = [
        ("run", "outputs equal", "cached tokens", "chunks loaded by rank", "differing")
    ]
    for name, found in runs.items():
        equal = sum(a == b for a, b in zip(found["tokens"], known, strict=False))
        loaded = (
            ", ".join(str(rank[key]) for rank in found["ranks"])
            for key in ("loaded", "loaded_differing")
        )
        rows.append(
            (name, f"{equal} of {len(found['tokens'])}", f"{sum(found['cached']):,}", *loaded)
        )
    return rows


def parser() -> argparse.ArgumentParser:
    ranks = argparse.ArgumentParser(
        prog="ranks", description=f"Check the outputs of an engine on multiple GPUs. {STATUS}"
    )
    ranks.add_argument(
        "--tp", type=whole(1, 8), default=1, help="tensor-parallel ranks (default 1)"
    )
    ranks.add_argument("--pp", type=whole(1, 8), default=1, help="pipeline stages (default 1)")
    add_model(ranks)
    add_sizes(ranks, blocks=2600, host_gib=8)
    return ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check. Return 1 if the check fails, or 2 if it cannot run."""
    args, screen = parser().parse_args(argv), console()
    if not can_run("ranks"):
        return 2
    shape = options_of(args.model, args.layers)
    llm = {
        "tensor_parallel_size": args.tp,
        "pipeline_parallel_size": args.pp,
        "max_model_len": 24576,
        "enforce_eager": True,
        "attention_backend": "TRITON_ATTN",
        "disable_custom_all_reduce": True,
        **shared_gpu(args.blocks, shape),
        **shape["llm"],
    }
    options = {
        **shape,
        "llm": llm,
        "num_blocks": args.blocks,
        "host_bytes": args.host_gib << 30,
        "longest": 16385,
    }
    name = f"ranks_tp{args.tp}_pp{args.pp}"
    result = run(options=options, log=Path(args.logs) / f"{name}.log", timeout_s=args.timeout)
    screen.print(table_of(table(result)))
    found = list(problems(result, args.tp * args.pp))
    write(args.json, {**result, "problems": found})
    return verdict(found)


if __name__ == "__main__":
    raise SystemExit(main())
