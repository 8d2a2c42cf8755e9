"""Benchmarks key computation from Python: `python benches/bench_keys.py [--json]`.

Each figure is the minimum of many runs, which alternate with runs of plain BLAKE3 (the `blake3`
package) over the same bytes, so that ratios stay meaningful on a busy machine.
"""

import argparse
import array
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from blake3 import blake3

from kvloft import _core

NUM_IDS = 131_072
NUM_ROWS, WIDTH = 512, 4096
ROOT = _core.root_key(bytes(32), None, None)


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table.

    ``measured`` and ``target`` are in ``unit``. ``plain_ms`` is the time plain BLAKE3 takes to hash
    the same bytes.
    """

    name: str
    measured: float
    target: float | None
    unit: str
    plain_ms: float | None
    met: bool | None


def best_ms(turns: int, *calls: Callable[[], object]) -> list[float]:
    """Run the calls alternately and return each call's minimum time in milliseconds.

    The minimum approximates the cost on an otherwise idle machine.
    """
    best = [float("inf")] * len(calls)
    for _ in range(turns):
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[index] = min(best[index], (time.perf_counter() - start) * 1e3)
    return best


def percent_of_plain(
    name: str, turns: int, ours: Callable[[], object], plain: Callable[[], object]
) -> Result:
    """Measure the throughput of ``ours`` as a percentage of plain BLAKE3's."""
    ours_ms, plain_ms = best_ms(turns, ours, plain)
    return Result(
        name, plain_ms / ours_ms * 100, 90, "% of plain", plain_ms, plain_ms / ours_ms >= 0.9
    )


def append_tokens(ids: Sequence[int], block_tokens: int) -> _core.KeyChain:
    chain = _core.KeyChain(ROOT, block_tokens=block_tokens)
    chain.append_tokens(ids)
    return chain


def append_embeds(rows: bytes, block_tokens: int) -> None:
    _core.KeyChain(ROOT, block_tokens=block_tokens).append_embeds(
        rows, dtype="bfloat16", width=WIDTH
    )


def token_results(turns: int) -> list[Result]:
    generator = random.Random(0)
    ids = [generator.randrange(151_936) for _ in range(NUM_IDS)]
    raw = array.array("I", ids).tobytes()
    results = []
    for block_tokens, target in ((256, 1.5), (16, 2.3)):
        ours, plain = best_ms(
            turns, lambda size=block_tokens: append_tokens(ids, size), lambda: blake3(raw).digest()
        )
        name = f"{NUM_IDS} token ids from a list, blocks of {block_tokens}"
        results.append(Result(name, ours, target, "ms", plain, ours <= target))
    chain = append_tokens(ids, 16)
    [one] = best_ms(turns * 50, lambda: chain.append_tokens(ids, NUM_IDS - 1))
    results.append(Result("appending one token id from a list", one * 1e3, None, "us", None, None))
    return results


def embed_results(turns: int) -> list[Result]:
    """Measure key computation for embedding rows on one thread and on all threads.

    The single-thread cases append 32 rows per call, too few to be split across threads.
    """
    rows = random.Random(1).randbytes(NUM_ROWS * WIDTH * 2)
    part = 32 * WIDTH * 2
    parts = [rows[at : at + part] for at in range(0, len(rows), part)]
    results = []
    for block_tokens in (16, 32):

        def ours(block_tokens: int = block_tokens) -> None:
            chain = _core.KeyChain(ROOT, block_tokens=block_tokens)
            for piece in parts:
                chain.append_embeds(piece, dtype="bfloat16", width=WIDTH)

        name = f"{NUM_ROWS} bf16 rows of {WIDTH}, blocks of {block_tokens}, 1 thread"
        results.append(percent_of_plain(name, turns, ours, lambda: blake3(rows).digest()))

    def plain() -> bytes:
        return blake3(rows, max_threads=blake3.AUTO).digest()

    for block_tokens in (16, 256):
        name = f"{NUM_ROWS} bf16 rows of {WIDTH}, blocks of {block_tokens}, all threads"
        results.append(
            percent_of_plain(
                name, turns, lambda size=block_tokens: append_embeds(rows, size), plain
            )
        )
    return results


def table(results: Sequence[Result]) -> str:
    lines = [f"{'':<52} {'measured':>18} {'target':>9} {'':>7}  plain BLAKE3"]
    for result in results:
        sign = "<=" if result.unit == "ms" else ">="
        target = "" if result.target is None else f"{sign} {result.target:g}"
        verdict = "" if result.met is None else ("met" if result.met else "MISSED")
        plain = "" if result.plain_ms is None else f"{result.plain_ms:.3f} ms"
        lines.append(
            f"{result.name:<52} {result.measured:>7.2f} {result.unit:<10} {target:>9} {verdict:>7} "
            f" {plain}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--turns", type=int, default=100, help="base number of repetitions (default 100)"
    )
    options = parser.parse_args(argv)
    results = token_results(options.turns) + embed_results(options.turns * 4)
    print(
        json.dumps([asdict(result) for result in results], indent=1)
        if options.json
        else table(results)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
