"""Runs one engine under a closed loop of chats: `python -m benches.gpu.chats_child NAME JSON`.

Each chat sends its next turn when the previous turn finishes. A turn's prompt is all of the chat's
earlier tokens plus some new tokens. Prints a line `RESULT {...}` after each run of all chats, even
if the run reaches the time limit.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Load:
    """A run's workload, with sizes in tokens."""

    num_chats: int = 64
    num_turns: int = 5
    first_tokens: int = 4000
    more_tokens: int = 400
    generated_tokens: int = 150


@dataclass(slots=True)
class Chat:
    """A chat's tokens so far, and the times when its current turn began and got its first token."""

    said: list[int]
    turn: int = 0
    sent_s: float = 0.0
    first_s: float | None = None


@dataclass(slots=True)
class Seen:
    """Totals of the finished turns."""

    ttfts_s: list[list[float]] = field(default_factory=list)
    prompt_tokens: int = 0
    known_tokens: int = 0
    """Number of prompt tokens repeated from an earlier turn of the chat."""
    cached_tokens: int = 0
    num_turns: int = 0


def run_chats(
    engine: Any, load: Load, deadline_s: float, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Run all chats.

    Return the makespan, token counts and TTFTs. If ``clock()`` reaches ``deadline_s``, the run
    stops, and "unfinished" is the number of remaining turns.
    """
    chats: dict[str, Chat] = {}
    seen = Seen([[] for _ in range(load.num_turns)])
    begin = clock()
    for _ in range(load.num_chats):
        _send(engine, chats, Chat(engine.prompt(load.first_tokens)), load, clock)
    while chats and clock() < deadline_s:
        for output in engine.engine.step():
            name = output.request_id.partition("-")[0]
            if (chat := chats.get(name)) is None:
                continue
            if chat.first_s is None and output.outputs and output.outputs[0].token_ids:
                chat.first_s = clock()
            if output.finished:
                del chats[name]
                _take(seen, chat, output, load, clock())
                if chat.turn + 1 < load.num_turns:
                    said = [
                        *chat.said,
                        *output.outputs[0].token_ids,
                        *engine.prompt(load.more_tokens),
                    ]
                    _send(engine, chats, Chat(said, chat.turn + 1), load, clock)
    if chats:
        engine.engine.abort_request(sorted(chats))
    return {
        "makespan_s": clock() - begin,
        "unfinished": load.num_chats * load.num_turns - seen.num_turns,
        "prompt_tokens": seen.prompt_tokens,
        "known_tokens": seen.known_tokens,
        "cached_tokens": seen.cached_tokens,
        "ttft_ms": [
            round(statistics.median(turn) * 1e3, 1) if turn else None for turn in seen.ttfts_s
        ],
    }


def _send(
    engine: Any, chats: dict[str, Chat], chat: Chat, load: Load, clock: Callable[[], float]
) -> None:
    chat.sent_s = clock()
    chats[engine.add(chat.said, load.generated_tokens)] = chat


def _take(seen: Seen, chat: Chat, output: Any, load: Load, now_s: float) -> None:
    seen.num_turns += 1
    seen.ttfts_s[chat.turn].append((chat.first_s or now_s) - chat.sent_s)
    seen.prompt_tokens += len(chat.said)
    seen.known_tokens += len(chat.said) - load.more_tokens if chat.turn else 0
    seen.cached_tokens += output.num_cached_tokens or 0


def count_preemptions(engine: Any) -> list[int]:
    """Return a one-item list that counts the scheduler's preemptions after this call."""
    scheduler = engine.engine.engine_core.engine_core.scheduler
    preempt, count = scheduler._preempt_request, [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted
    return count


def main(name: str, options: dict[str, Any]) -> None:
    """Start the engine and run the loop up to ``options["repeats"]`` times, each time with new
    chats.
    """
    import vllm
    from benches.gpu.engine_child import wait_registered
    from benches.gpu.llama import Engine, worker_totals

    begin = time.perf_counter()
    options["name"] = name
    print("PHASE start", flush=True)
    engine = Engine(name, options)
    preemptions = count_preemptions(engine)
    result: dict[str, Any] = {
        "name": name,
        "start_s": time.perf_counter() - begin,
        "runs": [],
        "vllm": vllm.__version__,
    }
    engine.ttft(engine.prompt(2048))
    wait_registered(engine, options)
    engine.settle()
    deadline_s = begin + options["child_s"]
    for number in range(options["repeats"]):
        if number and time.perf_counter() + result["runs"][-1]["makespan_s"] > deadline_s:
            break
        print("PHASE run", number + 1, flush=True)
        before, preempted = worker_totals(), preemptions[0]
        found = run_chats(engine, Load(**options["load"]), deadline_s)
        after = worker_totals()
        found["preemptions"] = preemptions[0] - preempted
        found["moved"] = {key: after[key] - before.get(key, 0) for key in after}
        result["runs"].append(found)
        print("RESULT", json.dumps(result), flush=True)
        if found["unfinished"]:
            break
        engine.settle()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # skip the engine's shutdown, which can hang in some vLLM releases
