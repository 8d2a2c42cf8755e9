"""Builds the `kvloft check` report: compares outputs and formats the verdict and the tables.

All functions are pure and depend only on the engines' events.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from kvloft.config.units import size_text

NEAR = {"float32": 1e-3, "float64": 1e-3}
NEAR_ELSE = 0.3
"""Difference in log probability below which rounding can change the chosen token."""
MANY_TIMES = 10
"""Maximum difference in log probability, as a multiple of the difference with vLLM's own cache."""
LEAST_ACCEPTED, FEW_DRAFTS = 0.9, 2
"""Minimum number of draft tokens accepted with hits: this fraction of the number accepted without
hits, minus this number of tokens.
"""
MORE_MEMORY = 1.02
"""The report adds a note if kvloft increases GPU memory per request by more than this factor."""
TITLES = {
    "plain": "vLLM alone, computed",
    "own": "vLLM alone, its prefix cache",
    "cold": "kvloft, cold",
    "host": "kvloft, host memory",
    "fork": "kvloft, other endings",
    "disk": "kvloft, disk, new engine",
    "reset": "kvloft, after a reset",
}

FAILED = {
    "alone": "vLLM did not run",
    "with kvloft": "vLLM did not run with kvloft",
    "with kvloft again": "a second engine did not run with kvloft",
}


@dataclass(frozen=True, slots=True)
class Pass:
    """The results of one pass over the prompts, compared with the results of vLLM alone.

    Attributes:
        answers: number of outputs. Each output is ``equal``, ``near`` or ``wrong``.
        near: number of outputs that differ only because of rounding: at the first token that
            differs, the two best candidates were nearly equally likely.
        difference: maximum difference in log probability across equal tokens. prompt, cached, host,
        disk: numbers of prompt tokens: all tokens, tokens found in vLLM's prefix cache
            or kvloft, tokens loaded from host memory, and tokens loaded from disk.
        blocks: number of loaded blocks per KV cache group.
        drafted, accepted: number of proposed and accepted draft tokens.
        errors: number of kvloft errors plus chunks that failed verification.
    """

    name: str
    answers: int
    equal: int
    near: int
    wrong: int
    difference: float
    prompt: int
    cached: int
    host: int
    disk: int
    blocks: list[int]
    drafted: int
    accepted: int
    errors: int


def compare(name: str, answers: dict[str, Any], truth: dict[str, Any], near: float) -> Pass:
    """Compare the outputs of one pass with ``truth``, the outputs of vLLM alone."""
    kinds, difference = [], 0.0
    for prompt, answer in answers.items():
        true = truth[prompt]
        pairs = list(zip(answer["tokens"], true["tokens"], strict=False))
        same = next((nth for nth, (one, other) in enumerate(pairs) if one != other), len(pairs))
        ours, theirs = answer["clear"][:same], true["clear"][:same]
        for one, other in zip(ours, theirs, strict=False):
            difference = max(difference, abs(one[0] - other[0]))
        if answer["tokens"] == true["tokens"]:
            kinds.append("equal")
        else:
            distance, second = near, None
            if same < len(true["clear"]):
                _, distance, second = true["clear"][same]
            is_near = distance < near and answer["tokens"][same] == second
            kinds.append("near" if is_near else "wrong")
    rows = list(answers.values())
    sums = {
        what: sum(row[what] for row in rows)
        for what in ("prompt", "cached", "host", "disk", "drafted", "accepted")
    }
    blocks = [sum(column) for column in zip(*(row["blocks"] for row in rows), strict=True)]
    counts = {kind: kinds.count(kind) for kind in ("equal", "near", "wrong")}
    errors = sum(row["errors"] + row["damaged"] for row in rows)
    return Pass(
        name, len(rows), difference=difference, blocks=blocks, errors=errors, **counts, **sums
    )


def make_report(
    engines: list[tuple[str, list[dict[str, Any]], str | None]], about: dict[str, Any]
) -> dict[str, Any]:
    """Return the report as a JSON object.

    ``engines`` holds each engine's name, events and error. The first engine is vLLM alone.
    """
    every = [(name, event) for name, events, _ in engines for event in events]
    facts = {name: event["facts"] for name, event in every if event["event"] == "started"}
    runs = [event for _, event in every if event["event"] == "pass"]
    truth: dict[str, Any] = next((each["answers"] for each in runs if each["name"] == "plain"), {})
    near = NEAR.get(facts.get("alone", {}).get("dtype", ""), NEAR_ELSE)
    passes = {
        event["name"]: compare(event["name"], event["answers"], truth, near) for event in runs
    }
    errors = [f"{FAILED[name]}: {error}" for name, _, error in engines if error]
    missing = errors or list(_missing(passes, near))
    return about | {
        "served": not missing,
        "missing": missing,
        "remarks": list(_remarks(passes, facts, about, is_served=not missing)),
        "engines": facts,
        "passes": [asdict(one) for one in passes.values()],
    }


def _missing(passes: dict[str, Pass], near: float) -> Iterator[str]:
    """Yield the reasons why kvloft does not support the model."""
    own, cold = passes["own"], passes["cold"]
    for name in ("cold", "host", "fork", "disk", "reset"):
        one, title = passes[name], TITLES[name]
        if one.wrong:
            yield (
                f"{title}: {one.wrong} of {one.answers} outputs differ from the outputs of vLLM "
                "alone"
            )
        elif one.difference > max(near, MANY_TIMES * own.difference):
            yield (
                f"{title}: log probabilities differ by up to {one.difference:.2g} (vLLM's prefix "
                f"cache: {own.difference:.2g})"
            )
        if one.errors:
            yield f"{title}: {one.errors} errors in kvloft, including damaged chunks"
        if name in ("cold", "reset") and one.host + one.disk:
            yield (
                f"{title}: {one.host + one.disk} tokens were loaded from a cache that should be "
                "empty"
            )
        if name in ("host", "disk") and one.accepted < LEAST_ACCEPTED * cold.accepted - FEW_DRAFTS:
            yield (
                f"{title}: {one.accepted} draft tokens were accepted, compared with "
                f"{cold.accepted} for the same outputs without a hit"
            )
    if not passes["host"].host:
        yield "no tokens were loaded from host memory"
    if not passes["disk"].disk:
        yield "no tokens were loaded from disk"
    if passes["host"].near == passes["host"].answers:
        yield (
            "rounding changed every output, so the comparison is meaningless; use --dtype float32"
        )


def _remarks(
    passes: dict[str, Pass], facts: dict[str, Any], about: dict[str, Any], *, is_served: bool
) -> Iterator[str]:
    alone, ours = facts.get("alone", {}), facts.get("with kvloft", {})
    least = alone.get("request_bytes") or float("inf")
    is_more = bool(ours) and ours["request_bytes"] > MORE_MEMORY * least
    if is_more:
        with_it, without = (size_text(facts["request_bytes"]) for facts in (ours, alone))
        yield (
            f"a request with {ours['max_model_len']} tokens uses {with_it} of GPU KV memory with "
            f"kvloft, and {without} without it"
        )
    if (
        len(alone.get("groups", ())) > 1
        and (is_more or not is_served)
        and about["extra"].get("kv_groups") == "one"
    ):
        yield (
            f"without kvloft, vLLM uses {len(alone['groups'])} KV cache groups; set kv_groups to "
            "auto"
        )
    if {"own", "host"} <= passes.keys() and passes["host"].cached < passes["own"].cached:
        yield (
            f"with kvloft, {passes['host'].cached} prompt tokens were cache hits; with vLLM's own "
            f"prefix cache, {passes['own'].cached} were"
        )
    near = sum(one.near for one in passes.values() if one.name != "own")
    if near:
        yield (
            f"{near} outputs differ only because of rounding: two tokens were nearly equally "
            "likely; use --dtype float32 for an exact comparison"
        )
    if about["ignored"]:
        yield f"ignored API server flags: {' '.join(about['ignored'])}"


def tables(report: dict[str, Any]) -> Iterator[Table | str]:
    """Yield the tables and text lines of the report."""
    passes = [Pass(**one) for one in report["passes"]]
    has_drafts = any(one.drafted for one in passes)
    table = Table(
        *("pass", "equal outputs", "prompt tokens", "from host", "from disk", "blocks by group"),
        title=report["model"],
    )
    if has_drafts:
        table.add_column("draft tokens accepted")
    for one in passes:
        equal = f"{one.equal} of {one.answers}" + (f", {one.near} near ties" if one.near else "")
        equal += f", {one.wrong} DIFFER" if one.wrong else ""
        loaded = [str(one.host), str(one.disk), " ".join(map(str, one.blocks))]
        if one.name in ("plain", "own"):
            loaded = ["", "", ""]
        accepted = f"{one.accepted / one.drafted:.0%}" if one.drafted else "none"
        drafts = [accepted] if has_drafts else []
        table.add_row(TITLES[one.name], equal, str(one.prompt), *loaded, *drafts)
    if passes:
        yield table
    for name, facts in report["engines"].items():
        if name == "with kvloft again":  # the facts are the same as "with kvloft"
            continue
        fits = ""
        if facts["full_requests"]:
            each = size_text(facts["request_bytes"])
            fits = (
                f", enough for {facts['full_requests']:g} requests with {facts['max_model_len']} "
                f"tokens ({each} each)"
            )
        yield (
            f"vLLM {name}: {facts['blocks']} GPU KV blocks{fits}; groups: "
            f"{groups_text(facts['groups'])}"
        )
    yield from (f"note: {remark}" for remark in report["remarks"])
    yield verdict(report)


def groups_text(groups: list[dict[str, Any]]) -> str:
    """Return the group counts by kind and reach as text, such as "3 window 63, 1 full"."""
    names = [f"{g['kind']} {g['reach']}" if g["reach"] else g["kind"] for g in groups]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def verdict(report: dict[str, Any]) -> str:
    """Return a line that says whether kvloft supports the model."""
    if report["served"]:
        passes = {one["name"]: one for one in report["passes"]}
        host, disk = passes["host"], passes["disk"]
        return (
            f"kvloft supports {report['model']} with these flags: equal outputs, {host['host']} of "
            f"{host['prompt']} prompt tokens from host memory, {disk['disk']} of {disk['prompt']} "
            "from disk."
        )
    return (
        f"With these flags, kvloft does NOT support {report['model']}: "
        f"{'; '.join(report['missing'])}."
    )
