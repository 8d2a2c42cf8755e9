"""Writes docs/models.md from the `kvloft check` reports on the tiny models in tests/e2e/zoo.

First run `KV_ZOO=all pytest tests/e2e/zoo/test_checks.py`, which writes one report per model to
build/models. Then run `python scripts/models_table.py`. The table lists only models with a report.
`make test` compares new reports with the page.
"""

import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REPORTS, PAGE = ROOT / "build" / "models", ROOT / "docs" / "models.md"
REASON_CHARS = 150
REASONS = {
    "AMX": "on CPUs without AMX, vLLM does not split MLA prompts",
    "Mamba2": "speculative decoding with Mamba2",
}
"""Maps a substring of a reported reason to the table's text for that reason."""
NEEDS_GROUPS = "Failed to promote local KV cache specs"
"""vLLM's error message for a model whose layers do not fit in a single KV cache group."""
ABOUT = """\
`scripts/models_table.py` generated this page from `kvloft check` runs on {date}. The runs used
kvloft {kvloft} and vLLM {vllm} on {machine} CPUs with float32 and [tiny, randomly initialized
models](\
https://github.com/kvloft/kvloft/blob/main/tests/e2e/zoo/README.md), one for each kind of KV cache.
For Mamba and gated delta net models, the tests replace vLLM's incomplete CPU kernels. {memory}To
test your model, run `kvloft check MODEL -- FLAGS`.
"""
COLUMNS_HELP = """
| column | meaning |
| --- | --- |
| groups | KV cache groups: full attention, sliding window or local chunk of n tokens, \
state (Mamba, gated delta net) |
| tokens | cached tokens of {prompts} prompts: from host memory, from disk, from vLLM's own \
prefix cache |
| blocks | blocks loaded from disk, by group |

A model is supported if its outputs are identical to plain vLLM's and hits do not lower the
acceptance rate of draft tokens. With `kv_groups: one`, models with Mamba or gated delta net states
are not supported; all others are.

"""
MEMORY = "Requests use no extra KV memory, except with `kv_groups: one`. "
FOOT = """
## Unsupported settings

An engine that uses any of these settings or models does not start.

"""
REFUSED = (
    ("setting or model", "reason", "use instead"),
    ("---", "---", "---"),
    (
        "more than one MTP layer",
        "in the next step, vLLM rewrites the last positions of the later layers",
        "`num_speculative_tokens` 1",
    ),
    (
        "`--decode-context-parallel-size`, `--prefill-context-parallel-size`",
        "not tested, because vLLM does not support them on CPUs",
        "1",
    ),
    (
        "pipeline parallelism with speculative decoding",
        "with this combination, vLLM fails on CPUs",
        "`--pipeline-parallel-size` 1, or no `--speculative-config`",
    ),
    (
        "pipeline parallelism before vLLM 0.32, or with states on GPUs",
        "not tested",
        "`--pipeline-parallel-size` 1",
    ),
    (
        "`--kv-cache-dtype *_per_token_head`",
        "vLLM can overwrite loaded scales",
        "`fp8` or `auto`",
    ),
    (
        "`--prefix-match-unit` with states",
        "vLLM also keeps states within blocks; kvloft saves states only at block ends",
        "the default",
    ),
    (
        "speculative decoding with Mamba2 or convolutions",
        "vLLM 0.32 computes wrong outputs after some hits in its own prefix cache",
        "no `--speculative-config`",
    ),
    (
        "speculative decoding with states, asynchronous scheduling and Model Runner V1",
        "vLLM can continue from another request's state",
        "`--no-async-scheduling`",
    ),
    (
        "states and a draft model whose KV heads differ from the model's",
        "the block sizes differ between groups",
        "a different draft model, or none",
    ),
)
"""Settings that `vllm/support.py` rejects, so no report has them."""
COLUMNS = ("model", "groups", "tokens", "blocks")


def main() -> int:
    """Write the page. Return 1 if no reports exist."""
    reports = [json.loads(path.read_text()) for path in sorted(REPORTS.glob("*.json"))]
    if not reports:
        print(f"no reports in {REPORTS}; run KV_ZOO=all pytest tests/e2e/zoo/test_checks.py first")
        return 1
    first, dates = reports[0], sorted({report["date"] for report in reports})
    versions = {
        name: ", ".join(sorted({report["versions"][name] for report in reports}))
        for name in first["versions"]
    }
    whole = next(one for report in reports for one in report["passes"] if one["name"] == "own")
    memory = MEMORY if all(map(_is_memory_equal, reports)) else ""
    about = ABOUT.format(date=" to ".join(dates), memory=memory, **versions)
    head = (
        f"# Supported models\n\n{textwrap.fill(about, 100, break_long_words=False)}\n"
        f"{COLUMNS_HELP.format(prompts=whole['answers'])}"
    )
    lines: list[Sequence[str]] = [
        COLUMNS,
        ["---"] * len(COLUMNS),
        *sorted(row(report) for report in reports if is_shown(report)),
    ]
    PAGE.write_text(head + _table(lines) + FOOT + _table(REFUSED))
    return 0


def _table(lines: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def is_shown(report: dict[str, Any]) -> bool:
    """Return True if the report gets a row in the table.

    Reports with `kv_groups: one` get no row if the page's introduction covers their result.
    """
    needs_groups = any(NEEDS_GROUPS in reason for reason in report["missing"])
    return not needs_groups and not (_is_one_group(report) and report["served"])


def row(report: dict[str, Any]) -> list[str]:
    passes = {one["name"]: one for one in report["passes"]}
    name = f"{report['model']} (one)" if _is_one_group(report) else report["model"]
    groups = _groups(report["engines"]["alone"]["groups"])
    if not report["served"]:
        return [name, groups, f"not supported: {_short(report['missing'][0])}", ""]
    found = f"{passes['host']['host']}/{passes['disk']['disk']}/{passes['own']['cached']}"
    return [name, groups, found, "/".join(map(str, passes["disk"]["blocks"]))]


def _is_one_group(report: dict[str, Any]) -> bool:
    return bool(report["extra"].get("kv_groups") == "one")


def _is_memory_equal(report: dict[str, Any]) -> bool:
    """Return True if a request uses the same KV memory with and without kvloft.

    Also returns True with `kv_groups: one`, an exception that the page mentions.
    """
    engines = report["engines"]
    return _is_one_group(report) or len({facts["request_bytes"] for facts in engines.values()}) == 1


def _groups(groups: list[dict[str, Any]]) -> str:
    names = [f"{g['kind']} {g['reach']}" if g["reach"] else g["kind"] for g in groups]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def _short(reason: str) -> str:
    """Return the reason from REASONS, or the start of the reported reason without model paths."""
    if known := next((text for part, text in REASONS.items() if part in reason), None):
        return known
    reason = re.sub(
        r"; run '[^']*' without kvloft", "", reason.removeprefix("vLLM did not run with kvloft: ")
    ).replace("|", "/")
    return reason if len(reason) <= REASON_CHARS else f"{reason[:REASON_CHARS]}..."


if __name__ == "__main__":
    raise SystemExit(main())
