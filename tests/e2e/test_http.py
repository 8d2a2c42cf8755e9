"""Tests kvloft through `vllm serve`: /v1/completions with prompt embeddings and salts, and `vllm
bench serve`.
"""

import base64
import io
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from .client import BLOCK, PACE, Req, Server, Zygote, full_blocks, kvloft, random_ids
from .conftest import Truth
from .test_keys import embeds

NUM_ROWS = 100


def encoded(rows: NDArray[np.float32]) -> str:
    """Encode rows as the API expects: the output of torch.save in base64."""
    import torch

    buffer = io.BytesIO()
    torch.save(torch.from_numpy(rows.copy()), buffer)
    return base64.b64encode(buffer.getvalue()).decode()


class Serving:
    """Starts servers, one at a time, with the same model and disk directory."""

    def __init__(self, zygote: Zygote, model: Path, disk: Path) -> None:
        self._zygote, self.model, self._disk = zygote, model, disk
        self.server: Server | None = None

    def start(self, transfer: dict[str, Any] | None = None, *flags: str) -> Server:
        transfer = transfer or kvloft(self._disk)
        self.server = self._zygote.server(
            [
                "--model",
                str(self.model),
                "--enforce-eager",
                "--dtype",
                "float32",
                "--block-size",
                str(BLOCK),
                "--max-model-len",
                "512",
                "--num-gpu-blocks-override",
                "64",
                "--max-num-seqs",
                "16",
                "--enable-prompt-embeds",
                "--no-enable-prefix-caching",
                "--kv-transfer-config",
                json.dumps(transfer),
                *flags,
            ]
        )
        return self.server.wait()

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()


@pytest.fixture
def serving(zygote: Zygote, model: Path, tmp_path: Path) -> Iterator[Serving]:
    servers = Serving(zygote, model, tmp_path / "disk")
    yield servers
    servers.stop()


def complete(server: Server, model: Path, max_tokens: int = 8, **fields: Any) -> tuple[int, ...]:
    """Return the token ids of one greedy completion."""
    body = {
        "model": str(model),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return tuple(server.post("/v1/completions", body | fields)["choices"][0]["token_ids"])


def settled(
    server: Server, model: Path, name: str, at_least: float, timeout_s: float = 20.0 * PACE
) -> float:
    """Wait until a metric is at least ``at_least``, and return its value.

    Engines send statistics only when they run steps, so each check requests one token.
    """
    deadline = time.monotonic() + timeout_s
    while (value := server.metrics().get(name, 0.0)) < at_least and time.monotonic() < deadline:
        complete(server, model, 1, prompt=[5])
        time.sleep(0.1)
    if value < at_least:  # pytest shows the output of a failed test
        print({name: num for name, num in server.metrics().items() if "kvloft" in name and num})
    return value


def test_embeddings_over_http_across_a_restart(truth: Truth, serving: Serving) -> None:
    a, b = embeds(1, NUM_ROWS), embeds(2, NUM_ROWS)
    hits = "vllm:external_prefix_cache_hits_total"
    server = serving.start()
    assert complete(
        server, serving.model, prompt_embeds=encoded(a), cache_salt="one"
    ) == truth.tokens(Req(embeds=a))
    assert server.metrics()[hits] == 0
    assert settled(server, serving.model, "vllm:kvloft_disk_used", 3) >= 3
    server.stop()

    server = serving.start()
    for rows, salt, external in ((b, "one", 0), (a, "two", 0), (a, "one", full_blocks(NUM_ROWS))):
        before = server.metrics()[hits]
        said = complete(server, serving.model, prompt_embeds=encoded(rows), cache_salt=salt)
        assert said == truth.tokens(Req(embeds=rows))
        assert server.metrics()[hits] - before == external, salt
    before = server.metrics()[hits]
    zeros = (0,) * NUM_ROWS
    assert complete(server, serving.model, prompt=list(zeros), cache_salt="one") == truth.tokens(
        Req(zeros)
    )
    assert server.metrics()[hits] == before
    assert server.metrics()["vllm:kvloft_load_tokens_disk_total"] == full_blocks(NUM_ROWS)


def test_bench_serve_with_shared_prefixes_fails_no_request_and_metrics_add_up(
    serving: Serving, tmp_path: Path
) -> None:
    server = serving.start()
    server.bench(
        [
            "--model",
            str(serving.model),
            "--dataset-name",
            "random",
            "--random-prefix-len",
            str(3 * BLOCK),
            "--random-input-len",
            "40",
            "--random-output-len",
            "4",
            "--num-prompts",
            "200",
            "--max-concurrency",
            "16",
            "--ignore-eos",
            "--seed",
            "3",
            "--disable-tqdm",
            "--save-result",
            "--result-dir",
            str(tmp_path),
            "--result-filename",
            "bench.json",
        ],
        tmp_path / "bench.log",
    )
    result = json.loads((tmp_path / "bench.json").read_text())
    assert (result["completed"], result["failed"]) == (200, 0)
    settled(server, serving.model, "vllm:kvloft_saved_chunks_total", 200)
    metrics = server.metrics()
    loaded = (
        metrics["vllm:kvloft_load_tokens_host_total"]
        + metrics["vllm:kvloft_load_tokens_disk_total"]
    )
    assert loaded == metrics["vllm:external_prefix_cache_hits_total"] >= 150 * 3 * BLOCK
    block_bytes = (
        metrics["vllm:kvloft_saved_bytes_total"] / metrics["vllm:kvloft_saved_chunks_total"]
    )
    assert metrics["vllm:kvloft_loaded_bytes_total"] == loaded / BLOCK * block_bytes
    assert (
        metrics["vllm:kvloft_frames_visible"] + metrics["vllm:kvloft_frames_free"]
        == metrics["vllm:kvloft_frames_total"]
    )
    assert metrics["vllm:kvloft_pins"] == metrics["vllm:kvloft_frames_reserved"] == 0
    for name in (
        "hook_errors",
        "verify_failures",
        "save_failed_chunks",
        "load_lost_blocks",
        "disk_verify_failures",
    ):
        assert metrics.get(f"vllm:kvloft_{name}_total", 0) == 0, name
    ids = random_ids(7000, 60)
    assert len(complete(server, serving.model, 4, prompt=list(ids))) == 4


def among(*children: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a MultiConnector with the given children in order."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def example(folder: Path) -> dict[str, Any]:
    """Return the configuration of vLLM's ExampleConnector, which stores prompts in ``folder``."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


@pytest.mark.short
@pytest.mark.parametrize("order", ["first, with kvloft", "last, with another connector"])
def test_inside_multi_connector_100_prompts_come_back_from_host_and_after_a_restart_from_disk(
    serving: Serving, tmp_path: Path, order: str
) -> None:
    ours, others_folder = kvloft(tmp_path / "disk"), tmp_path / "other"
    transfer = (
        among(ours, kvloft(namespace="sibling"))  # without a disk
        if order.startswith("first")
        else among(example(others_folder), ours)
    )
    prompts = [list(random_ids(7100 + i, 3 * BLOCK + 5)) for i in range(50)]
    hits = "vllm:external_prefix_cache_hits_total"
    server = serving.start(transfer)
    cold = [complete(server, serving.model, prompt=prompt) for prompt in prompts]
    if others_folder.exists():
        assert complete(server, serving.model, prompt=prompts[0]) == cold[0]
        metrics = server.metrics()
        assert (metrics[hits], metrics["vllm:kvloft_load_tokens_host_total"]) == (3 * BLOCK, 0), (
            "the first child with tokens loads them"
        )
        shutil.rmtree(others_folder)
    assert [complete(server, serving.model, prompt=prompt) for prompt in prompts] == cold
    assert settled(server, serving.model, "vllm:kvloft_disk_used", 150) >= 150
    assert server.metrics()["vllm:kvloft_load_tokens_host_total"] == 50 * 3 * BLOCK
    server.stop()

    shutil.rmtree(others_folder, ignore_errors=True)
    server = serving.start(transfer)
    assert [complete(server, serving.model, prompt=prompt) for prompt in prompts] == cold
    assert (
        settled(server, serving.model, "vllm:kvloft_load_tokens_disk_total", 50 * 3 * BLOCK)
        == 50 * 3 * BLOCK
    )
    assert server.metrics().get("vllm:kvloft_hook_errors_total", 0) == 0


def test_two_api_servers_export_each_gauge_once(serving: Serving) -> None:
    server = serving.start(None, "--api-server-count", "2")
    for i in range(8):
        complete(server, serving.model, prompt=list(random_ids(7200 + i, 3 * BLOCK + 5)))
    settled(server, serving.model, "vllm:kvloft_saved_chunks_total", 24)
    lines = [
        line
        for line in server.get("/metrics").splitlines()
        if line.startswith("vllm:kvloft_frames_total")
    ]
    assert len(lines) == 1
