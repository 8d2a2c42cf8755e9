"""`make demo`: runs a chat six times with vLLM on the CPU and shows where the KV came from.

1. without any cache (the reference)
2. with kvloft, cold
3. again on the same engine: from vLLM's own prefix cache
4. again after clearing vLLM's prefix cache: from host memory
5. again in a new engine process: from disk
6. in a new engine process after the previous engine was killed: from `kvloft serve`'s memory

DEMO_MODEL selects the model (`demo_models.py`). Decoding is greedy, and outputs are compared token
by token. If rounding could change an output token, the demo first replaces that turn's prompt.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_models import DemoModel, chosen_model
from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).resolve().parents[1] / "build" / "demo"
NUM_TURNS = 4
ANSWER_TOKENS = 34
SAFE_MARGIN = 3e-4
"""Minimum distance between the two highest logits. The batch shape changes logits by about 1e-5."""

MAX_ATTEMPTS = 20
PROGRESS_S = 10.0
"""Seconds between progress lines if the output is not a terminal."""
BAR_CHARS = 20

PASSES = {
    "none": "no cache",
    "cold": "cold",
    "gpu": "vLLM's cache",
    "host": "host memory",
    "disk": "disk",
    "server": "server",
}
MEANINGS = {
    "none": "plain vLLM, the reference",
    "cold": "kvloft's cache is empty; KV is saved",
    "gpu": "hits in vLLM's own prefix cache",
    "host": "vLLM's cache cleared; host memory hits",
    "disk": "new engine; disk hits",
    "server": "engine killed; `kvloft serve` hits",
}
WARM_UP = [1 + 7 * i % 90 for i in range(300)]
"""A prompt that is not part of the chat."""
NOTE = (
    "The vLLM column counts tokens from vLLM's own prefix cache, which also holds earlier turns of "
    "the same pass. Times vary with a small model on a busy machine; hits save more time with long "
    "prompts on a GPU."
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of one turn.

    ``gpu``, ``host``, ``disk`` and ``computed`` count prompt tokens by source. ``dropped`` is the
    number of unsaved chunks, and ``late`` the number of server calls that timed out.
    """

    tokens: list[int]
    margin: float
    ttft_s: float
    gpu: int
    host: int
    disk: int
    computed: int
    dropped: int
    late: int


class EngineProcess:
    """A vLLM engine in a new process, with its log in a file."""

    def __init__(self, name: str, model: Path, **arguments: Any) -> None:
        self.log = FOLDER / f"{name}.log"
        arguments |= {
            "model": str(model),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": 4096,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 2048,
            "num_gpu_blocks_override": 256,
            "block_size": 32,
            "disable_log_stats": False,
        }
        to_child, from_child = os.pipe(), os.pipe()
        program = f'exec "$0" "$1" "$2" 3<&{to_child[0]} 4>&{from_child[1]}'
        command = [
            "bash",
            "-c",
            program,
            sys.executable,
            str(Path(__file__).with_name("chat_engine.py")),
            json.dumps(arguments),
        ]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | ENVIRONMENT,
                pass_fds=(to_child[0], from_child[1]),
            )
        os.close(to_child[0])
        os.close(from_child[1])
        self._requests, self._answers = (
            os.fdopen(to_child[1], "w", buffering=1),
            os.fdopen(from_child[0]),
        )

    def wait(self) -> "EngineProcess":
        """Wait until the engine is ready, then run a warm-up prompt."""
        self._answer()
        self.serve("warm-up", WARM_UP)
        return self

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            end = self.log.read_text(errors="replace")[-3000:]
            raise SystemExit(f"{end}\nkvloft: the engine exited early; see its log ({self.log})")
        return dict(json.loads(line))

    def _ask(self, **message: Any) -> dict[str, Any]:
        print(json.dumps(message), file=self._requests)
        return self._answer()

    def serve(self, turn_id: str, prompt: list[int]) -> Turn:
        """Run one turn and return its result."""
        return Turn(**self._ask(turn_id=turn_id, prompt=prompt, max_tokens=ANSWER_TOKENS))

    def clear_gpu_cache(self) -> None:
        """Clear vLLM's own prefix cache but keep kvloft's chunks."""
        self._ask(reset=True)

    def kill(self) -> None:
        """Kill the engine to simulate a crash."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Shut down the engine. On shutdown, kvloft writes every chunk in host memory to disk."""
        self._requests.close()
        self._answer()
        self._process.wait()


@contextmanager
def kv_server() -> Iterator[str]:
    """Run `kvloft serve` without a disk tier and yield the value of the ``server`` setting."""
    log = FOLDER / "server.log"
    with tempfile.TemporaryDirectory(prefix="kvloft-") as folder, log.open("wb") as out:
        socket = Path(folder) / "kvloft.sock"
        command = [
            sys.executable,
            "-m",
            "kvloft.cli",
            "serve",
            "--socket",
            str(socket),
            "--host-size",
            "256MiB",
        ]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            while not socket.exists():
                if process.poll() is not None:
                    raise SystemExit(
                        f"{log.read_text(errors='replace')}\nkvloft: the server exited early"
                    )
                time.sleep(0.05)
            yield f"unix:{socket}"
        finally:
            process.terminate()
            process.wait()


def settle_chat(
    engine: EngineProcess, model: DemoModel, console: Console
) -> tuple[list[list[int]], list[Turn]]:
    """Run the chat without a cache and return the prompts and results."""
    history: list[int] = []
    prompts: list[list[int]] = []
    truth: list[Turn] = []
    for index in range(NUM_TURNS):
        for attempt in range(MAX_ATTEMPTS):
            prompt = history + model.user_turn(index, attempt)
            served = engine.serve(f"none-{index}-{attempt}", prompt)
            if served.margin >= SAFE_MARGIN:
                break
        prompts.append(prompt)
        truth.append(served)
        history = prompt + served.tokens
        report(console, "none", index, served, served)
        if text := model.text(served.tokens):
            console.print(f"    output: {text}", style="dim", highlight=False, markup=False)
    return prompts, truth


def replay(
    engine: EngineProcess, name: str, prompts: list[list[int]], truth: list[Turn], console: Console
) -> list[Turn]:
    """Run the chat again on ``engine`` and return the results."""
    turns = []
    for i, prompt in enumerate(prompts):
        turns.append(engine.serve(f"{name}-{i}", prompt))
        report(console, name, i, turns[-1], truth[i])
    return turns


def report(console: Console, name: str, index: int, turn: Turn, truth: Turn) -> None:
    same = "" if turn.tokens == truth.tokens else "  [red]OUTPUT DIFFERS[/]"
    console.print(
        f"  {PASSES[name]:<12} turn {index + 1}: first token after {turn.ttft_s * 1e3:5.0f} "
        f"ms{same}",
        highlight=False,
    )


@contextmanager
def stage(console: Console, what: str) -> Iterator[None]:
    """Show progress with a spinner on a terminal, or with a line every few seconds elsewhere."""
    if console.is_terminal:
        with console.status(what):
            yield
        return
    console.print(f"{what} ...", highlight=False)
    begin, end = time.monotonic(), threading.Event()

    def report_time() -> None:
        while not end.wait(PROGRESS_S):
            console.print(f"  ... {time.monotonic() - begin:.0f} s", highlight=False)

    thread = threading.Thread(target=report_time)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def run_all(console: Console) -> tuple[dict[str, list[Turn]], list[Turn]]:
    """Run the demo. Return the turns by pass and the killed engine's turns."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    name = os.environ.get("DEMO_MODEL") or "random"
    chosen = chosen_model(name)
    with stage(console, f"writing the model ({name})"):
        model = chosen.write(FOLDER / "model")
    settings = {"host_size": "256MiB", "disk_path": str(FOLDER / "disk"), "disk_size": "1GiB"}
    with stage(
        console,
        "starting two vLLM engines, one without a cache and one with kvloft (this takes a while)",
    ):
        plain = EngineProcess("none", model, enable_prefix_caching=False)
        engine = with_kvloft("cold", model, settings)
        plain.wait()
        engine.wait()
    with stage(console, "running vLLM without any cache"):
        prompts, truth = settle_chat(plain, chosen, console)
        plain.stop()
    with stage(console, "running vLLM with kvloft"):
        cold = replay(engine, "cold", prompts, truth, console)
        gpu = replay(engine, "gpu", prompts, truth, console)
        engine.clear_gpu_cache()
        host = replay(engine, "host", prompts, truth, console)
        engine.stop()
    with stage(console, "running a new vLLM process, with cached KV only on disk"):
        engine = with_kvloft("disk", model, settings).wait()
        disk = replay(engine, "disk", prompts, truth, console)
        engine.stop()
    killed, server = after_a_kill(model, prompts, truth, console)
    passes = {"none": truth, "cold": cold, "gpu": gpu, "host": host, "disk": disk, "server": server}
    return passes, killed


def with_kvloft(name: str, model: Path, settings: dict[str, str]) -> EngineProcess:
    """Start an engine with kvloft without waiting for it to be ready."""
    transfer = {
        "kv_connector": "KVLoftConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }
    return EngineProcess(name, model, enable_prefix_caching=True, kv_transfer_config=transfer)


def after_a_kill(
    model: Path, prompts: list[list[int]], truth: list[Turn], console: Console
) -> tuple[list[Turn], list[Turn]]:
    """Run an engine with a server, kill it, and run a new engine. Return both engines' turns."""
    with kv_server() as server:
        with stage(console, "running vLLM with `kvloft serve`, then killing the engine"):
            engine = with_kvloft("killed", model, {"server": server}).wait()
            first = [engine.serve(f"killed-{i}", prompt) for i, prompt in enumerate(prompts)]
            engine.kill()
        with stage(console, "running a new engine with the same server"):
            engine = with_kvloft("server", model, {"server": server}).wait()
            turns = replay(engine, "server", prompts, truth, console)
            engine.stop()
    return first, turns


def as_table(passes: dict[str, list[Turn]]) -> Table:
    """Return a table with one row per turn and pass."""
    table = Table(title="Where each prompt's KV came from (tokens)", title_justify="left")
    table.add_column("turn", justify="right")
    table.add_column("pass")
    for name in ("TTFT ms", "vLLM", "host", "disk", "computed"):
        table.add_column(name, justify="right")
    table.add_column("output")
    for i in range(NUM_TURNS):
        for name, turns in passes.items():
            turn, last = turns[i], name == "server"
            counts = [str(n) if n else "." for n in (turn.gpu, turn.host, turn.disk, turn.computed)]
            same = (
                "(reference)"
                if name == "none"
                else "equal"
                if turn.tokens == passes["none"][i].tokens
                else "[red]DIFFERS[/]"
            )
            table.add_row(
                str(i + 1),
                PASSES[name],
                f"{turn.ttft_s * 1e3:.0f}",
                *counts,
                same,
                end_section=last,
            )
    return table


def as_plot(passes: dict[str, list[Turn]]) -> Table:
    """Return a bar chart of the mean time to first token, and an explanation of each pass."""
    table = Table(title="Mean time to first token", title_justify="left", box=None)
    for column in ("pass", "ms", "", "meaning"):
        table.add_column(column, justify="right" if column == "ms" else "left")
    means = {name: sum(t.ttft_s for t in turns) / len(turns) for name, turns in passes.items()}
    longest = max(means.values())
    for name, ttft_s in means.items():
        bar = "█" * max(1, round(BAR_CHARS * ttft_s / longest))
        table.add_row(PASSES[name], f"{ttft_s * 1e3:.0f}", bar, MEANINGS[name])
    return table


def verdict(passes: dict[str, list[Turn]]) -> tuple[bool, str]:
    """Return True if the demo succeeded, and a summary for the user."""
    truth, disk = passes["none"], passes["disk"]
    wrong = [
        (n, i)
        for n, turns in passes.items()
        for i, t in enumerate(turns)
        if t.tokens != truth[i].tokens
    ]
    if wrong:
        return (
            False,
            f"FAILED: {len(wrong)} outputs differ from the reference; the first is {wrong[0]}.",
        )
    found, total = disk[0].disk, disk[0].disk + disk[0].computed
    kept = sum(t.host for t in passes["server"])
    if not found or not kept or not any(t.host for t in passes["host"]):
        return False, "FAILED: the outputs are correct, but the cache was not used."
    none_ms, disk_ms = truth[0].ttft_s * 1e3, disk[0].ttft_s * 1e3
    whole = sum(t.disk for t in disk)
    everything = sum(t.gpu + t.host + t.disk + t.computed for t in passes["server"])
    return True, (
        f"After the restart, {found} of the first turn's {total} prompt tokens came from disk "
        f"({whole} in all turns), with a time to first token of {disk_ms:.0f} ms (plain vLLM: "
        f"{none_ms:.0f} ms). After the kill, {kept} of {everything} tokens came from the server's "
        "memory. All outputs match the outputs without a cache."
    )


def explain_misses(turns: list[Turn]) -> str:
    """Return a sentence about unsaved chunks and late calls, or "" if there are none."""
    dropped, late = sum(turn.dropped for turn in turns), sum(turn.late for turn in turns)
    if not dropped and not late:
        return ""
    losses = [f"chunks not saved: {dropped}"] * bool(dropped)
    losses += [f"late responses from the server: {late}"] * bool(late)
    return f"This machine is busy ({', '.join(losses)}), so vLLM recomputed some tokens."


def main() -> int:
    """Run the demo. Return 0 if the cache was used and all outputs are correct, otherwise 1."""
    console = Console()
    passes, killed = run_all(console)
    good, sentence = verdict(passes)
    console.print()
    console.print(as_table(passes))
    console.print()
    console.print(as_plot(passes))
    console.print(NOTE, style="dim")
    if misses := explain_misses([*killed, *(turn for turns in passes.values() for turn in turns)]):
        console.print(f"[yellow]{misses}[/]", highlight=False)
    console.print(f"[{'green' if good else 'red'}]{sentence}[/]", highlight=False)
    return 0 if good else 1


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
