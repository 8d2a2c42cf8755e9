"""Fixtures of the symbolic engine. Without vLLM there is nothing to drive, and the tests are skipped, saying so."""

import importlib.util
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a config and no weights: nothing is ever computed with it."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 512,
        "max_position_embeddings": 4096, "torch_dtype": "float32",
    }))  # fmt: skip
    return path


@pytest.fixture(autouse=True)
def _vllm_is_quiet() -> Iterator[None]:
    """While these tests run: others look at what is logged."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
