"""Tests `kvloft size` with KV sizes that were computed by hand from published model shapes."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvloft.cli.__main__ import main

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "hidden_size": 7168,
}
GEMMA3_27B = {
    "text_config": {
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "hidden_size": 5376,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    }
}
QWEN3_NEXT = {
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "full_attention_interval": 4,
}
GPT_OSS = {
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}


def size(
    folder: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str], *flags: str
) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["size", str(folder), "--json", *flags]) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


@pytest.mark.parametrize(
    ("config", "token_kib", "window_kib", "num_states"),
    [
        (LLAMA_8B, 128, 0, 0),
        (DEEPSEEK_V3, 68.625, 0, 0),
        (GEMMA3_27B, 496, 8 * 52, 0),
        (QWEN3_NEXT, 24, 0, 36),
        (GPT_OSS, 72, 36, 0),
    ],
)
def test_size_of_a_known_model(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, Any],
    token_kib: float,
    window_kib: int,
    num_states: int,
) -> None:
    figures = size(tmp_path, config, capsys)
    assert figures["token_bytes"] == token_kib * 1024
    assert figures["window_bytes"] == window_kib * 1024
    assert figures["num_state_layers"] == num_states
    assert figures["host_tokens"] == (32 << 30) // (token_kib * 1024)


def test_fp8_halves_the_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        assert size(tmp_path, LLAMA_8B, capsys, "--kv-cache-dtype", name)["token_bytes"] == 64 << 10


@pytest.mark.parametrize(
    ("disk_read", "is_faster"), [("3GB", False), ("4GB", True), ("4GB/s", True)]
)
def test_break_even_of_disk_and_prefill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], disk_read: str, is_faster: bool
) -> None:
    figures = size(tmp_path, LLAMA_8B, capsys, "--prefill", "27000", "--disk-read", disk_read)
    assert figures["break_even_bytes_per_second"] == 27_000 * (128 << 10)
    assert figures["disk_is_faster"] is is_faster


@pytest.mark.parametrize(
    ("disk_read", "verdict"),
    [
        ("2GB", "computing is faster"),
        ("3GB", "reading is faster with compression"),
        ("4GB", "reading is faster"),
    ],
)
def test_the_verdict_includes_compression(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], disk_read: str, verdict: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert main(["size", str(tmp_path), "--prefill", "27000", "--disk-read", disk_read]) == 0
    out = capsys.readouterr().out
    assert verdict in out
    assert ("with compression" in out) == verdict.endswith("with compression")


def test_table_says_how_many_tokens_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert main(["size", str(tmp_path), "--host-size", "1GiB"]) == 0
    assert "8,192" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"num_hidden_layers": 2}', '{"num_hidden_layers": 1, "num_attention_heads": "x"}'],
)
def test_unusable_config_is_one_sentence_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert main(["size", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvloft: {tmp_path}")
    assert error.count("\n") == 1


def test_a_folder_or_file_is_never_looked_up_on_the_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvloft.cli.size._from_hub", lambda model: pytest.fail(model))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for model in ("empty", str(tmp_path / "missing"), "./missing"):
        assert main(["size", model]) == 2
        error = capsys.readouterr().err
        assert "config.json does not exist; use a directory" in error and "JSON (" not in error
    assert main(["size", "x" * 300]) == 2, "no file can have this name"
    assert "cannot be read ([Errno" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert main(["size", str(tmp_path / "config.json")]) == 0


@pytest.mark.parametrize("tokens", ["-5", "0", "x"])
def test_a_rate_of_no_tokens_is_refused(
    tokens: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(["size", str(tmp_path), f"--prefill={tokens}"])
    assert error.value.code == 2
    assert "expected a positive integer" in capsys.readouterr().err


def test_unknown_kind_of_layer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "layer_types": ["quantum"] * 32}))
    assert main(["size", str(tmp_path)]) == 2
    assert "quantum" in capsys.readouterr().err


def test_bfloat16_kv_is_compressed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A compressed 2 MiB chunk takes 0.7188 of its original size plus 512 entries of 8 bytes, or
    0.7208 in total.
    """
    found = size(tmp_path, LLAMA_8B, capsys, "--host-size", "16GiB", "--disk-size", "32GiB")
    assert found["compressed_token_bytes"] == int(131072 * (0.7188 + 512 * 8 / (2 << 20)))
    assert 1.38 < found["host_tokens_compressed"] / found["host_tokens"] < 1.39
    assert found["disk_tokens_compressed"] // 2 == found["host_tokens_compressed"]
    raw = size(tmp_path, LLAMA_8B, capsys, "--kv-cache-dtype", "fp8", "--disk-size", "32GiB")
    assert not any("compressed" in name for name in raw)
