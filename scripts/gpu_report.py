"""Prints a Markdown report of GPU results: `python scripts/gpu_report.py DIRECTORY`.

DIRECTORY holds the output of `scripts/gpu_check.sh`. The report compares each figure with its
target and ends with the contents of DIRECTORY/NOTES.md. Sections without a result file are omitted.
"""

import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COPY_TARGET, BOTH_TARGET = 0.98, 0.95
COMPRESSED_TARGET = 0.74
BESIDE_TARGETS = {"matmul": 1.05, "add": 1.04}
BESIDE_GBPS = 45.0
OURS = ("kvloft", "served")
COLD_PARTS = {
    "before_ms": "until the first forward pass",
    "gpu_ms": "first to last forward pass",
    "between_ms": "gaps between the forward passes",
    "after_ms": "until the token is available",
    "collected_ms": "Python's garbage collection in total",
}


def main(folder: Path) -> int:
    """Print the report on ``folder``. Return 1 if the folder has no results."""
    files = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    if not files:
        print(
            f"no results in {folder}: run scripts/gpu_check.sh with OUT={folder} first",
            file=sys.stderr,
        )
        return 1
    parts: list[str] = [*_head(files), *_failed(files)]
    if "copy" in files:
        parts += _copy(files["copy"])
    parts += _startup(files.get("engine_startup", {}))
    for name in ("chats", "chats_peers"):
        parts += _chats(files[name]) if name in files else ()
    parts += _peers(files.get("engine_peers", {}))
    if "engine" in files:
        parts += _engine(files["engine"], files.get("copy", {}).get("ceiling", {}).get("load"))
    parts += _again(
        [
            files[name]
            for name in sorted(files)
            if name == "engine" or name.startswith("engine_again")
        ]
    )
    for name in sorted(files):
        if name.startswith("engine_attached"):
            parts += _attached(files[name])
    if "engine_kv1" in files:
        parts += _one_kv_head(files["engine_kv1"])
    parts += _known(
        {
            name: files[name]
            for name in (
                "engine_groups",
                *(n for n in sorted(files) if n.startswith("engine_known_")),
            )
            if name in files
        }
    )
    for name in sorted(files):
        if name.startswith("equality"):
            parts += _equality(files[name])
    parts += _ranks({name: found for name, found in files.items() if name.startswith("ranks")})
    if "equality_crowd" in files:
        parts += _crowd(files["equality_crowd"])
    profile = folder / "ncu.txt"
    if profile.exists():
        parts += _profile(profile.read_text())
    notes = folder / "NOTES.md"
    print("\n".join(parts) + ("\n\n" + notes.read_text().rstrip() if notes.exists() else ""))
    return 0


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def _head(files: dict[str, Any]) -> Iterator[str]:
    machine = files.get("copy", {}).get("machine", {})
    commit = (
        os.environ.get("COMMIT")
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    yield (
        f"# {machine.get('gpu', 'GPU')}, driver {machine.get('driver', '?')}, "
        f"{machine.get('date', '?')}"
    )
    yield ""
    yield (
        f"Commit `{commit}`, torch {machine.get('torch', '?')}. Tables by `scripts/gpu_report.py`, "
        "notes written by hand."
    )


def _failed(files: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each failed engine. Its earlier measurements are in the tables."""
    for name, results in files.items():
        for connector, result in results.items() if name.startswith("engine") else ():
            if "error" in result:
                yield from (
                    "",
                    (
                        f"**{connector} failed** (`{name}.json`): "
                        f"{result['error'].splitlines()[0][:200]}"
                    ),
                )


def _copy(copy: dict[str, Any]) -> Iterator[str]:
    ceiling = copy["ceiling"]
    yield from ("", "## Copy: chunks of paged KV to and from host frames (`kvloft bench copy`)", "")
    yield (
        f"Ceilings, measured with one large copy (medians): save {ceiling['save']:.1f} GB/s, load "
        f"{ceiling['load']:.1f} GB/s, both {ceiling['both']:.1f} GB/s per direction. Targets: "
        f"{COPY_TARGET:.0%} of the ceiling in one direction, {BOTH_TARGET:.0%} in both."
    )
    if any("save_idle" in row for row in copy["pages"]):
        yield (
            "Saves and bidirectional copies are submitted while a kernel runs, as in an engine, "
            "and timed from the end of the kernel. Loads are timed from their submission. Shares "
            "are relative to a large copy right before each run, timed the same way. The last "
            "columns are saves on an idle GPU, timed from their submission; engines do not save on "
            "an idle GPU."
        )
    yield ""
    yield from (
        "| page | save GB/s | | load GB/s | | both, per direction | | | save, idle GPU | | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    )
    rows = [(f"{row['page_bytes'] / 1024:g} KiB", row) for row in copy["pages"]]
    rows += [(f"64 KiB, frames {row['order']}", row) for row in copy.get("frames", ())]
    for name, row in rows:
        share = {what: _share(row, what, ceiling) for what in ("save", "load", "both")}
        met = min(share["save"], share["load"]) >= COPY_TARGET and share["both"] >= BOTH_TARGET
        cells = " | ".join(f"{row[what]:.2f} | {share[what]:.2%}" for what in share)
        idle = "- | - | "
        if "save_idle" in row:
            idle = (
                f"{row['save_idle']:.2f} | {row['save_idle_share']:.2%} | "
                f"{_verdict(row['save_idle_share'] >= COPY_TARGET)}"
            )
        yield f"| {name} | {cells} | {_verdict(met)} | {idle} |"
    if compressed := [(name, row, row["compressed"]) for name, row in rows if "compressed" in row]:
        yield from (
            "",
            (
                "Compressed frames: GB/s of uncompressed bytes, and the ratio of the time to that "
                f"of raw frames (target: {COMPRESSED_TARGET}):"
            ),
            "",
        )
        yield from (
            "| page | save | | load | | both, per direction | | |",
            "|---|---|---|---|---|---|---|---|",
        )
        for name, raw, row in compressed:
            times = {what: raw[what] / row[what] for what in ("save", "load", "both")}
            cells = " | ".join(f"{row[what]:.2f} | {times[what]:.3f}" for what in times)
            yield f"| {name} | {cells} | {_verdict(max(times.values()) <= COMPRESSED_TARGET)} |"
    yield from (
        "",
        (
            "Slowdown of computation during a copy (targets for kvloft: matmul 1.05, add 1.04, at "
            "45 GB/s or more):"
        ),
        "",
        "| copy by | direction | computation | slowdown | copy GB/s | |",
        "|---|---|---|---|---|---|",
    )
    for row in copy["interference"]:
        met = row["slowdown"] <= BESIDE_TARGETS[row["work"]] and row["gbps"] >= BESIDE_GBPS
        verdict = _verdict(met) if row["by"] == "kvloft" else ""
        yield (
            f"| {row['by']} | {row['copy']} | {row['work']} | {row['slowdown']:.3f} | "
            f"{row['gbps']:.1f} | {verdict} |"
        )
    if "waits" in copy:
        yield from (
            "",
            (
                "Delay of an engine's own copies (128 KiB, such as sampled tokens) during copies "
                "in the same direction:"
            ),
            "",
        )
        yield from ("| copies by | direction | median ms | max ms |", "|---|---|---|---|")
        for row in copy["waits"]:
            yield f"| {row['by']} | {row['copy']} | {row['median_ms']:.2f} | {row['max_ms']:.2f} |"
    tag = copy["tag"]
    price = max(1 - tag[f"{what}_with"] / tag[f"{what}_without"] for what in ("save", "load"))
    yield ""
    yield (
        f"Cost of the tag: save {tag['save_without']:.2f} GB/s without and {tag['save_with']:.2f} "
        f"GB/s with the tag, load {tag['load_without']:.2f} and {tag['load_with']:.2f} GB/s "
        f"(target: at most 2%; {_verdict(price <= 0.02)})."
    )


def _share(row: dict[str, Any], what: str, ceiling: dict[str, float]) -> float:
    """Return a rate as a share of the ceiling that was measured immediately before the run.

    Older benchmark results have one ceiling per row, or a single ceiling.
    """
    return float(row.get(f"{what}_share") or row[what] / row.get(f"{what}_ceiling", ceiling[what]))


def _bound(results: dict[str, Any], ceiling_gbps: float | None) -> Iterator[str]:
    """Compare each of kvloft's warm TTFTs with its lower bound.

    The bound is the time to transfer the bytes over the link plus the TTFT from HBM, which is
    measured immediately afterwards.
    """
    ours = results.get("kvloft", {}).get("ttft", {})
    times = ours.get("all_ms", {})
    warm, hits = times.get("warm", ()), times.get("hbm", ())
    if not (ceiling_gbps and warm and len(warm) == len(hits)):
        return
    link = ours["kv_bytes"] / ceiling_gbps / 1e6
    shares = sorted(one / (link + hit) for one, hit in zip(warm, hits, strict=True))
    share = statistics.median(shares)
    yield (
        f"Ratio of each warm TTFT to its lower bound ({link:.1f} ms for the bytes at "
        f"{ceiling_gbps:.1f} GB/s, plus the TTFT from HBM right afterwards): {shares[0]:.3f} to "
        f"{shares[-1]:.3f}, median {share:.3f} (target 1.05; "
        f"{_verdict(share <= 1.05)})."
    )


def _engine(results: dict[str, Any], ceiling_gbps: float | None) -> Iterator[str]:
    columns = [name for name in ("none", "native", "kvloft") if name in results]
    none, native, ours = (results.get(name, {}) for name in ("none", "native", "kvloft"))
    yield from ("", "## Engine: Llama-3.1-8B shape (`benches/gpu/engine.py`), medians, ms", "")
    yield (
        "native is vLLM's OffloadingConnector; none is vLLM without a connector. The engines take "
        "turns, one measurement at a time."
    )
    yield from (
        "",
        f"| | {' | '.join(columns)} | target | |",
        "|---|" + "---|" * (len(columns) + 2),
    )

    def row(what: str, path: tuple[str, ...], target: str = "", met: bool | None = None) -> str:
        values = [_get(results[name], path) for name in columns]
        cells = " | ".join("-" if value is None else f"{value:,.2f}" for value in values)
        if target.endswith("nan"):
            return f"| {what} | {cells} | not compared | |"
        return f"| {what} | {cells} | {target} | {'' if met is None else _verdict(met)} |"

    def parts(*path: str) -> Iterator[str]:
        for part, what in COLD_PARTS.items():
            if any(_get(result, (*path, part)) is not None for result in results.values()):
                yield row(f"- {what}", (*path, part))

    def ratio(path: tuple[str, ...], rival: dict[str, Any]) -> float:
        a, b = _get(ours, path), _get(rival, path)
        return a / b if a and b else float("nan")

    warm, cold = ratio(("ttft", "warm_ms"), native), ratio(("cold", "cold_ms"), none)
    yield row(
        "TTFT for 32,768 tokens, cold",
        ("cold", "cold_ms"),
        f"1.005 of none: {cold:.4f}",
        cold <= 1.005,
    )
    yield from parts("cold")
    yield row(
        "TTFT for 32,768 tokens, from host memory",
        ("ttft", "warm_ms"),
        f"0.93 of native: {warm:.3f}",
        warm <= 0.93,
    )
    yield row("TTFT for 32,768 tokens, from HBM", ("ttft", "hbm_ms"))
    wave, prefill = (
        ratio(("wave", "warm_makespan_ms"), native),
        ratio(("wave", "cold_makespan_ms"), none),
    )
    yield row(
        "8 x 16k together, cold: makespan",
        ("wave", "cold_makespan_ms"),
        f"1.005 of none: {prefill:.4f}",
        prefill <= 1.005,
    )
    yield from parts("wave", "cold_parts")
    rates = {name: _cold_tokens_a_second(results[name]) for name in columns}
    if (plain := rates.get("none")) and (rate := rates.get("kvloft")):
        cells = " | ".join(
            "-" if rates[name] is None else f"{rates[name]:,.0f}" for name in columns
        )
        share = rate / plain
        yield (
            f"| cold prefill, single and together, tokens/s | {cells} | 0.995 of none: {share:.4f} "
            f"| {_verdict(share >= 0.995)} |"
        )
    yield row(
        "8 x 16k together, warm: makespan",
        ("wave", "warm_makespan_ms"),
        f"0.9 of native: {wave:.3f}",
        wave <= 0.9,
    )
    for mark, limit in (("p50", 1.005), ("p99", 1.03)):
        path = ("decode", "plain", f"alone_{mark}_ms")
        value = ratio(path, none)
        yield row(f"decode step, {mark}", path, f"{limit} of none: {value:.3f}", value <= limit)
    path = ("decode", "saving", "all_p99_ms")
    value = ratio(path, none)
    yield row(
        "decode steps while 16k prompts arrive and are saved, p99",
        path,
        f"1.05 of none: {value:.3f}",
        value <= 1.05,
    )
    yield row("of these, decode steps without a prompt, p99", ("decode", "saving", "alone_p99_ms"))
    yield row(
        "decode steps while 16k prompts arrive and are loaded, p50",
        ("decode", "loading", "all_p50_ms"),
    )
    yield row(
        "decode steps while 16k prompts arrive and are loaded, p99",
        ("decode", "loading", "all_p99_ms"),
    )
    yield ""
    for name in columns:
        waves = [
            f"{row['makespan_ms']:.0f} (mean {row['mean_ms']:.0f})"
            for row in results[name].get("wave", {}).get("warm", ())
        ]
        if waves and name != "none":
            yield f"Warm makespans of 8 x 16k, {name}: {', '.join(waves)} ms."
    yield from _bound(results, ceiling_gbps)
    yield (
        "Bytes kvloft loaded in the last warm round: "
        f"{_get(ours, ('ttft', 'loaded_bytes_last_round')) or 0:,.0f}."
    )


def _cold_tokens_a_second(result: dict[str, Any]) -> float | None:
    """Return the tokens per second over all cold prompts, both single prompts and waves.

    Returns None if single prompts or waves are missing or incomplete, because rates are
    comparable only if the engines do the same work.
    """
    context = _get(result, ("cold", "context")) or _get(result, ("ttft", "context"))
    alone = result.get("cold", {}).get("all_ms", ())
    waves = [
        wave for wave in result.get("wave", {}).get("cold", ()) if isinstance(wave, dict)
    ]  # older benchmark results have a single wave, not a list
    if not context or not alone or not waves or any(wave.get("finished", 8) != 8 for wave in waves):
        return None
    total_ms = sum(alone) + sum(wave["makespan_ms"] for wave in waves)
    return (len(alone) * context + len(waves) * 8 * context / 2) / total_ms * 1e3


def _again(runs: list[dict[str, Any]]) -> Iterator[str]:
    """Summarize cold prefill over multiple runs. One run is not enough, because the ratio varies
    between runs by as much as the target allows (0.5%).
    """
    context = next(
        (found for run in runs if (found := _get(run.get("none", {}), ("cold", "context")))), 0.0
    )
    rows: list[tuple[float, float, float]] = []
    num_failed = 0
    for run in runs:
        none, ours = run.get("none", {}), run.get("kvloft", {})
        paths = (("cold", "cold_ms"), ("wave", "cold_makespan_ms"))
        times = [(_get(ours, path), _get(none, path)) for path in paths]
        rates = _cold_tokens_a_second(ours), _cold_tokens_a_second(none)
        num_failed += "error" in ours
        if all(a and b for a, b in (*times, rates)) and _get(none, ("cold", "context")) == context:
            rows.append(tuple(a / b for a, b in (*times, rates)))  # type: ignore[arg-type, operator]
    if len(rows) + num_failed < 2:
        return
    yield from (
        "",
        (
            f"Cold prefill in {len(rows)} runs, each with new processes: ratios of kvloft to plain "
            "vLLM"
        ),
        "",
    )
    yield from (
        "| run | single prompts | 8 together: makespan | tokens/s of both |",
        "|---|---|---|---|",
    )
    for number, row in enumerate(rows, 1):
        yield f"| {number} | {' | '.join(f'{value:.4f}' for value in row)} |"
    if num_failed:
        yield f"| failed runs of kvloft: {num_failed} | {' | '.join([_verdict(False)] * 3)} |"
    elif rows:
        one, wave, rate = (statistics.median(column) for column in zip(*rows, strict=True))
        verdicts = (one, one <= 1.005), (wave, wave <= 1.005), (rate, rate >= 0.995)
        cells = (f"{value:.4f} {_verdict(met)}" for value, met in verdicts)
        yield f"| median | {' | '.join(cells)} |"


def _attached(results: dict[str, Any]) -> Iterator[str]:
    """Report the time that a connector adds, from runs with and without it in one process."""
    for connector, result in results.items():
        found = result.get("attached", {})
        kinds = [found.get(what, {}) for what in ("prompts", "waves")]
        if not all(
            kind.get(state, {}).get("ms") for kind in kinds for state in ("attached", "detached")
        ):
            continue
        yield from (
            "",
            (
                f"Cold prefill in one process of {connector}, alternately with and without the "
                "connector, medians, ms:"
            ),
            "",
        )
        yield from ("| | without | with | target | |", "|---|---|---|---|---|")
        context = found["context"]
        labels = f"TTFT for {context:,} tokens", f"8 x {context // 2048}k together: makespan"
        for kind, what in zip(kinds, labels, strict=True):
            without, with_it = kind["detached"], kind["attached"]
            ratio = with_it["ms"] / without["ms"]
            yield (
                f"| {what} ({len(with_it['all_ms'])} runs) | {without['ms']:,.2f} | "
                f"{with_it['ms']:,.2f} "
                f"| 1.005: {ratio:.4f} | {_verdict(ratio <= 1.005)} |"
            )
            for part, label in COLD_PARTS.items():
                if part in without and part in with_it:
                    yield f"| - {label} | {without[part]:,.2f} | {with_it[part]:,.2f} | | |"


def _one_kv_head(results: dict[str, Any]) -> Iterator[str]:
    median = {
        name: statistics.median(result["ttft"]["all_ms"]["warm"])
        for name, result in results.items()
    }
    ratio = median["kvloft"] / median["native"]
    yield ""
    yield (
        "Llama-3.1-8B shape with one KV head (8 KiB pages), TTFT for 32,768 tokens from host "
        f"memory: native {median['native']:.1f} ms, kvloft {median['kvloft']:.1f} ms, ratio "
        f"{ratio:.3f} (target 0.85; {_verdict(ratio <= 0.85)})."
    )


def _known(every: dict[str, dict[str, Any]]) -> Iterator[str]:
    if not every:
        return
    yield from ("", "## TTFT of cached prompts: multiple KV cache groups, draft models", "")
    yield (
        "| model, engine | tokens | cold, ms | from HBM, ms | from host memory, ms | ratio to link "
        "time plus HBM (1.05) | | KV blocks |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for model, found in every.items():
        for name, result in found.items():
            row = result.get("ttft", {})
            times = (
                f"{row[key]:.1f}" if key in row else "-" for key in ("cold_ms", "hbm_ms", "warm_ms")
            )
            share = row.get("warm_of_bound")
            bound = "- | " if share is None else f"{share:.3f} | {_verdict(share <= 1.05)}"
            what = f"{model.removeprefix('engine_').removeprefix('known_')}, {name}"
            yield (
                f"| {what} | {row.get('context', '-')} | {' | '.join(times)} | {bound} | "
                f"{result.get('kv_blocks', '-')} |"
            )


def _peers(results: dict[str, Any]) -> Iterator[str]:
    """Compare the TTFT of cached prompts between kvloft's server and other servers."""
    medians = {
        name: result["ttft"]["warm_ms"]
        for name, result in results.items()
        if "warm_ms" in result.get("ttft", {})
    }
    others = [value for name, value in medians.items() if name not in OURS]
    if "served" not in medians or not others:
        return
    texts = ", ".join(f"{name} {value:.1f}" for name, value in medians.items())
    yield from (
        "",
        "## TTFT of cached prompts from a server's host memory, compared with other servers",
        "",
    )
    yield (
        f"Medians, ms: {texts} (target: kvloft's is the lowest; "
        f"{_verdict(medians['served'] <= min(others))})."
    )
    for name in medians:
        found, asked = (
            results[name]["ttft"].get(key, []) for key in ("cached_tokens", "from_connector")
        )
        if asked and any(ours < all_of_it for ours, all_of_it in zip(asked, found, strict=True)):
            yield (
                f"{name}: **not all hits are from the server**, because tokens were left in HBM: "
                f"{asked} tokens from the server, {found} cached."
            )


def _ranks(files: dict[str, Any]) -> Iterator[str]:
    if not files:
        return
    yield from ("", "## Engines with multiple ranks (`benches/gpu/ranks.py`)", "")
    yield from ("| engine | run | chunks loaded by rank | differing |", "|---|---|---|---|")
    for name, found in files.items():
        for run, row in found.get("runs", {}).items():
            loaded, differing = (
                ", ".join(str(rank[key]) for rank in row["ranks"])
                for key in ("loaded", "loaded_differing")
            )
            yield f"| {name} | {run} | {loaded} | {differing} |"
    yield ""
    for name, found in files.items():
        yield f"- {name}: {_verdict(not found['problems'])}" + "".join(
            f"; {problem.splitlines()[0]}" for problem in found["problems"]
        )


def _equality(found: dict[str, Any]) -> Iterator[str]:
    yield from ("", "## Token equality and byte audit (`benches/gpu/equality.py`)", "")
    if "note" in found:
        yield from (found["note"], "")
    yield from (
        "| engine | run | tokens equal | preempted | chunks loaded | differing |",
        "|---|---|---|---|---|---|",
    )
    for setup in found["setups"].values():
        for row in setup["runs"]:
            equal = "-" if row["equal"] is None else f"{row['equal']} of {row['total']}"
            yield (
                f"| {setup['what']} | {row['run']} | {equal} | {row['preemptions']} | "
                f"{row['loaded']:,} | {row['differing']:,} |"
            )
    yield ""
    yield "Problems: " + (
        "none." if not found["problems"] else "; ".join(text[:200] for text in found["problems"])
    )


def _startup(results: dict[str, Any]) -> Iterator[str]:
    for result in results.values():
        if found := result.get("startup"):
            yield from ("", "## Saves while host memory is being registered", "")
            yield (
                f"After {found['rows'][-1]['at_s']:.1f} s, {found['pinned_gib']:.1f} GiB had been "
                f"registered; {found['saved_chunks']:,} chunks were saved, and "
                f"{found['failed_chunks']:,} failed (target: 0; "
                f"{_verdict(not found['failed_chunks'])})."
            )


def _chats(results: dict[str, Any]) -> Iterator[str]:
    """Compare kvloft's makespan with that of the fastest other engine."""
    yield from ("", "## A closed loop of chats (`benches/gpu/chats.py`), one engine at a time", "")
    yield from (
        "| | makespan, s | all runs | repeated tokens cached | preempted | |",
        "|---|---|---|---|---|---|",
    )
    runs = {
        name: [run for run in result["runs"] if not run["unfinished"]]
        for name, result in results.items()
    }
    medians = {
        name: statistics.median(run["makespan_s"] for run in found)
        for name, found in runs.items()
        if found
    }
    best = min((value for name, value in medians.items() if name not in OURS), default=math.inf)
    for name, found in runs.items():
        if name not in medians:
            yield (
                f"| {name} | - | - | - | - | "
                f"{results[name].get('error', 'not measured').splitlines()[0][:120]} |"
            )
            continue
        known, cached = (
            sum(run[f"{what}_tokens"] for run in found) for what in ("known", "cached")
        )
        verdict = (
            f"at most {best:.1f} (fastest other engine): {_verdict(medians[name] <= best)}"
            if name in OURS
            else ""
        )
        every, preempted = (
            ", ".join(texts)
            for texts in zip(
                *((f"{r['makespan_s']:.1f}", str(r["preemptions"])) for r in found), strict=True
            )
        )
        yield (
            f"| {name} | {medians[name]:.1f} | {every} | {cached / max(known, 1):.1%} | "
            f"{preempted} | {verdict} |"
        )


def _crowd(found: dict[str, Any]) -> Iterator[str]:
    """Compare preemptions with and without the connector, both with a prefix cache."""
    counts = {
        name: sum(row["preemptions"] for row in setup["runs"] if row["run"] == "crowd cold")
        for name, setup in found["setups"].items()
    }
    if {"plain-pc", "hnd"} <= counts.keys():
        plain, ours = counts["plain-pc"], counts["hnd"]
        equal = not found["problems"]
        yield ""
        yield (
            f"Preemptions: {ours} with kvloft, {plain} with plain vLLM (target: at most 1.2 times "
            "as many, and tokens equal; "
            f"{_verdict(equal and ours <= 1.2 * plain)})."
        )


def _profile(text: str) -> Iterator[str]:
    """Report one row for each kernel launch in ncu's output."""
    metrics = ("Duration", "DRAM Throughput", "Compute (SM) Throughput", "Achieved Occupancy")
    launches: list[tuple[str, dict[str, str]]] = []
    for line in text.splitlines():
        if launch := re.match(r" +(\w+_chunks) \((\d+), 1, 1\)x", line):
            launches.append((f"`{launch[1]}` | {launch[2]}", {}))
        elif (
            launches
            and (value := re.match(r" +(\S.*?)  +(\S+) +([\d.,]+)\s*$", line))
            and value[1] in metrics
        ):
            launches[-1][1].setdefault(
                value[1], value[3] if value[2] == "%" else f"{value[3]} {value[2]}"
            )
    yield from ("", "## Kernels (`ncu`, clocks not locked, 4 KiB pages)", "")
    yield from (
        "| kernel | CTAs | duration | HBM busy, % | SMs busy, % | occupancy, % |",
        "|---|---|---|---|---|---|",
    )
    for name, found in launches:
        yield f"| {name} | " + " | ".join(found.get(metric, "-") for metric in metrics) + " |"


def _get(result: dict[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = result
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) else None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
