"""Chooses prompts for `kvloft check`. Prompt lengths are chosen to expose cache errors, and
rounding does not affect the outputs.

The prompts are chosen in an engine without kvloft's connector.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvloft.vllm.check import Engine

MAX_PROMPT_TOKENS = 10_000
PROMPT_UNITS = (1.4, 2.5, 4.3, 6.7)
"""Prompt lengths, in multiples of vLLM's prefix-cache hit granularity."""
LONG_PROMPT_TOKENS = 1024
NUM_FORKED = 2
NUM_TRIES = 4
"""Maximum number of prompts to try per length."""
CLEAR, CLEAR_ELSE = 0.01, 0.3
"""Minimum difference in log probability between the two best tokens, for float32 and for other
dtypes. Below this difference, rounding could change the output.
"""
WORDS = """
    river stone seven under garden letter cold bright number window paper walk green often table
    north voice slow market train winter glass remember island second bridge quiet metal story
    before orange engine doctor circle travel answer music field
"""

Chosen = tuple[list[int], dict[str, Any]]
"""A prompt and its result without cache hits."""


def choose_prompts(engine: Engine, num_output_tokens: int) -> dict[str, Chosen]:
    """Return the chosen prompts by name. Most lengths are not multiples of the hit granularity,
    and some exceed every sliding window and attention chunk.

    A "fork" starts with the same tokens as an earlier prompt and then differs.
    """
    facts = engine.facts()
    unit, reach = facts["hit_tokens"], max(group["reach"] for group in facts["groups"])
    longest = min(MAX_PROMPT_TOKENS, facts["max_model_len"] - num_output_tokens - 1)
    wanted = [unit * units for units in PROMPT_UNITS]
    wanted += [reach + unit * 3.6, LONG_PROMPT_TOKENS + unit * 2.6]
    lengths = sorted({min(longest, round(length)) for length in wanted})
    prompts: dict[str, Chosen] = {}
    for length in lengths:
        prompts[f"prompt {length}"] = _clear_prompt(engine, [], length)
    for length in lengths[-NUM_FORKED:]:
        head = prompts[f"prompt {length}"][0][: length * 3 // 5]
        prompts[f"fork {length}"] = _clear_prompt(engine, head, length)
    return prompts


def _clear_prompt(engine: Engine, head: list[int], length: int) -> Chosen:
    """Try prompts that start with ``head``, and return the prompt that is least sensitive to
    rounding.
    """
    enough = CLEAR if engine.facts()["dtype"] == "float32" else CLEAR_ELSE
    best: Chosen = ([], {})
    clearest = -1.0
    for nth in range(NUM_TRIES):
        ids = [*head, *_random_ids(engine.llm, nth, length - len(head))]
        engine.forget()
        answer = engine.ask(ids)
        distance = min((distance for _, distance, _ in answer["clear"]), default=0.0)
        if distance > clearest:
            best, clearest = (ids, answer), distance
        if clearest >= enough:
            break
    return best


def _random_ids(llm: Any, nth: int, count: int) -> list[int]:
    """Return the token ids of random words or, without a tokenizer, random token ids."""
    chance = random.Random(f"{count} {nth}")
    if not llm.vllm_config.model_config.skip_tokenizer_init:
        text = " ".join(chance.choices(WORDS.split(), k=count + 1))
        ids = list(llm.get_tokenizer().encode(text, add_special_tokens=False))
        if len(ids) >= count:
            return ids[:count]
    vocab = llm.vllm_config.model_config.get_vocab_size()
    return [chance.randrange(min(3, vocab - 1), vocab) for _ in range(count)]
