"""docs/models.md out of what `kvloft check` found over the tiny models of tests/e2e/zoo: `python scripts/models_table.py`.

It reads build/models, where `KV_ZOO=all pytest tests/e2e/zoo/test_checks.py` leaves a report for each model, and invents nothing: a
model without a report is not in the table. The same tests compare what they find with the page, in every run of `make test`.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REPORTS, PAGE = ROOT / "build" / "models", ROOT / "docs" / "models.md"
REASON_CHARS = 150
HEAD = """\
# Models that were tried

Made by `scripts/models_table.py` from what `kvloft check` found on {date}: kvloft {kvloft}, vLLM {vllm}
on {machine} CPUs, float32, tiny models with random weights of each kind of KV cache (`tests/e2e/zoo`).
States, but for lfm2's, are computed by kernels of the tests (`tests/e2e/zoo/kernels.py`), because
vLLM's for CPUs are not exact or keep too little; everything else is vLLM's. No model of real size is
in this table: `kvloft check MODEL -- FLAGS` finds it out for yours.

"Served" means: the same tokens as vLLM alone in every answer, cold, from host memory, from disk after
a restart, with other endings and after a reset; and from both tiers something was loaded. "Found" are
tokens of {prompts} prompts that came from host memory and from disk, beside what vLLM's own prefix
cache finds of them. "Blocks" were loaded from disk, by group. "Memory" is the KV memory that vLLM sets
aside for a request of {max_model_len} tokens, without and with kvloft. A "window 63" group needs the last 63
tokens before a hit's end, a "local 64" group those of the last 64 that the end cuts, a "state" group
one state.

"""
FOOT = """
## What is refused, and what to set

An engine says it at start, too.

"""
REFUSED = (
    ("setting or model", "why", "instead"),
    ("---", "---", "---"),
    (
        "several MTP layers at once",
        (
            "vLLM writes the last positions of later layers again in the next step; for CPUs it runs the first layer only, so "
            "nothing shows there whether that is right"
        ),
        "`num_speculative_tokens` 1",
    ),
    (
        "`--decode-context-parallel-size`",
        'not tried: vLLM for CPUs does not run it ("CPUAttentionBackendImpl does not" return the softmax LSE)',
        "1",
    ),
    (
        "`--prefill-context-parallel-size`",
        'not tried: vLLM for CPUs does not run it ("Model Runner V1 does not support: prefill context parallel")',
        "1",
    ),
    (
        "`--prefix-match-unit` beside states",
        "vLLM keeps states within blocks then, where prompts end, and kvloft keeps them at blocks' ends",
        "leave it out",
    ),
    (
        "drafts beside Mamba2 or convolutions",
        "vLLM 0.32 alone answers some hits of its own cache wrongly",
        "leave `--speculative-config` out",
    ),
    (
        "drafts beside states with async scheduling, Model Runner V1",
        "vLLM may go on from another request's state",
        "`--no-async-scheduling`",
    ),
    (
        "states and a drafter whose KV heads are not like the model's",
        "vLLM gives them blocks of several sizes",
        "another drafter, or none",
    ),
)
"""What no report can tell: settings that `vllm/support.py` refuses."""
COLUMNS = (
    "model", "KV cache groups", "drafter", "`kv_groups`", "served", "found: host, disk, vLLM", "blocks", "memory",
    "drafts accepted: cold, host, disk",
)  # fmt: skip


def main() -> int:
    """Write the page; 1 where there is no report."""
    reports = [json.loads(path.read_text()) for path in sorted(REPORTS.glob("*.json"))]
    if not reports:
        print(f"no report in {REPORTS}: run KV_ZOO=all pytest tests/e2e/zoo/test_checks.py")
        return 1
    first, dates = reports[0], sorted({report["date"] for report in reports})
    versions = {name: ", ".join(sorted({report["versions"][name] for report in reports})) for name in first["versions"]}
    lengths = {facts["max_model_len"] for report in reports for facts in report["engines"].values()}
    whole = next(one for report in reports for one in report["passes"] if one["name"] == "own")
    head = HEAD.format(date=" to ".join(dates), prompts=whole["answers"], max_model_len=" or ".join(map(str, lengths)), **versions)
    lines: list[Sequence[str]] = [COLUMNS, ["---"] * len(COLUMNS), *sorted(row(report) for report in reports)]
    PAGE.write_text(head + _table(lines) + FOOT + _table(REFUSED))
    return 0


def _table(lines: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def row(report: dict[str, Any]) -> list[str]:
    """One report's cells."""
    passes = {one["name"]: one for one in report["passes"]}
    alone = report["engines"]["alone"]
    ours = report["engines"].get("with kvloft", {})
    served = "yes" if report["served"] else f"no: {_short(report['missing'][0])}"
    found = blocks = accepted = ""
    if "disk" in passes:
        found = f"{passes['host']['host']}, {passes['disk']['disk']}, {passes['own']['cached']}"
        blocks = ", ".join(map(str, passes["disk"]["blocks"]))
        if passes["own"]["drafted"]:
            accepted = ", ".join(f"{passes[name]['accepted']} of {passes[name]['drafted']}" for name in ("cold", "host", "disk"))
    memory = ", ".join(f"{facts['request_bytes'] / 1024:.0f} KiB" for facts in (alone, ours) if facts)
    kinds, setting = _groups(alone["groups"]), report["extra"].get("kv_groups", "")
    return [report["model"], kinds, alone["drafter"] or "", setting, served, found, blocks, memory, accepted]


def _groups(groups: list[dict[str, Any]]) -> str:
    names = [f"{g['kind']} {g['reach']}" if g["reach"] else g["kind"] for g in groups]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def _short(reason: str) -> str:
    """The first sentence's part that names what is missing, without the path of a model."""
    reason = re.sub(r"; run '[^']*' without kvloft", "", reason.removeprefix("with kvloft it did not run: ")).replace("|", "/")
    return reason if len(reason) <= REASON_CHARS else f"{reason[:REASON_CHARS]}..."


if __name__ == "__main__":
    raise SystemExit(main())
