"""Tests how GPU benchmark results are evaluated (percentiles, medians of runs, and the report's
verdicts). The results are made up.
"""

import importlib.util
import json
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benches.gpu import engine
from benches.gpu.engine_child import _by_kind, _middle, _percentiles, of_bound
from kvloft.bench.command import _rates
from kvloft.bench.rig import Rig

WHATS = ("save", "load", "both", "save_idle")
REPORT = Path(__file__).parents[2] / "scripts" / "gpu_report.py"


def test_percentiles_are_of_the_sorted_steps_in_milliseconds() -> None:
    found = _percentiles("alone", [n / 1000 for n in range(200, 0, -1)])
    marks = {
        "alone_p50_ms": 101,
        "alone_p90_ms": 181,
        "alone_p99_ms": 199,
        "alone_steps": 200,
        "alone_max_ms": 200,
    }
    assert found == pytest.approx(marks)
    assert _percentiles("alone", []) == {}


def test_steps_before_the_first_arrival_are_in_no_figure() -> None:
    found = _by_kind([(9.0, "before"), (0.001, "alone"), (0.002, "mixed"), (0.003, "mixed")])
    assert (found["all_steps"], found["alone_steps"], found["mixed_steps"]) == (3, 1, 2)
    assert found["all_max_ms"] == pytest.approx(3.0)


def test_one_disturbed_run_does_not_decide() -> None:
    runs = [{"p99": value} for value in (6.0, 99.0, 6.2)]
    assert _middle(runs) == {"p99": 6.2, "runs": runs}


def test_a_warm_first_token_is_compared_with_the_link_and_a_hit() -> None:
    assert of_bound(10.0, [22.0, 33.0, 26.0], [10.0, 20.0, 10.0]) == {
        "shares_of_bound": [1.1, 1.1, 1.3],
        "warm_of_bound": 1.1,
    }


def test_a_share_is_of_the_ceiling_measured_right_before_it() -> None:
    """The ceilings are 10, 20 and 30, and the shares are 0.9, 0.5 and 0.7.

    Separate medians of the rates and the ceilings would give a share of 10/20.
    """
    rig, ceiling = (
        object.__new__(Rig),
        SimpleNamespace(limits=cycle((10.0, 20.0, 30.0)), shares=cycle((0.9, 0.5, 0.7))),
    )
    rig.num_bytes = 10**9

    def gbps(_: str) -> float:
        ceiling.now = next(ceiling.limits)
        ceiling.next_s = 1 / (ceiling.now * next(ceiling.shares))
        return ceiling.now

    ceiling.gbps, ceiling.next_s = gbps, 1.0
    rig.seconds = lambda _: (ceiling.next_s, 0.0)  # type: ignore[method-assign]
    rate = rig.median("load", ceiling)  # type: ignore[arg-type]
    assert (rate.gbps, rate.ceiling_gbps, rate.share) == pytest.approx((10.0, 20.0, 0.7))


def test_the_table_shows_the_median_of_shares() -> None:
    row = dict.fromkeys(WHATS, 49.0) | {
        f"{what}_share": share for what, share in zip(WHATS, (0.98, 1.0, 0.8, 0.5), strict=True)
    }
    assert _rates(row) == [
        "49.00",
        "98.0%",
        "-",
        "49.00",
        "100.0%",
        "-",
        "49.00",
        "80.0%",
        "-",
        "49.00",
        "50.0%",
        "-",
    ]
    row["compressed"] = dict(zip(WHATS, (68.0, 69.0, 60.0, 67.0), strict=True))
    assert _rates(row)[2::3] == ["68.00", "69.00", "60.00", "67.00"]


def report(folder: Path, capsys: pytest.CaptureFixture[str], **files: Any) -> str:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    spec = importlib.util.spec_from_file_location("gpu_report", REPORT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(folder) == 0
    return capsys.readouterr().out


def copy_row(**shares: float) -> dict[str, float]:
    row = {"page_bytes": 4096.0}
    for what in WHATS:
        row |= {what: 50.0, f"{what}_share": shares.get(what, 1.0)}
    return row


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ({}, "met"),
        ({"save": 0.979}, "missed"),
        ({"load": 0.979}, "missed"),
        ({"save_idle": 0.5}, "met"),
        ({"both": 0.951}, "met"),
        ({"both": 0.949}, "missed"),
    ],
)
def test_the_report_judges_copies_by_their_own_ceiling(
    shares: dict[str, float], verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = {
        "machine": {},
        "ceiling": dict.fromkeys(("save", "load", "both"), 500.0),
        "pages": [copy_row(**shares)],
        "interference": [],
        "tag": dict.fromkeys(("save_with", "save_without", "load_with", "load_without"), 1.0),
    }
    (line,) = (
        text
        for text in report(tmp_path, capsys, copy=copy).splitlines()
        if text.startswith("| 4 KiB")
    )
    assert line.split("|")[8].strip(" *") == verdict


def test_the_report_shows_every_figure_of_a_copy_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"save": 51.0, "load": 52.0, "both": 53.0, "save_idle": 54.0}
    shares = {
        "save_share": 0.991,
        "load_share": 0.992,
        "both_share": 0.993,
        "save_idle_share": 0.974,
    }
    row = {"page_bytes": 4096.0, **figures, **shares}
    older = {"page_bytes": 8192.0, "save": 49.0, "load": 49.5, "both": 45.0, "save_ceiling": 50.0}
    copy = {
        "machine": {},
        "ceiling": dict.fromkeys(("save", "load", "both"), 50.0),
        "pages": [row, older],
        "interference": [],
        "frames": [{**row, "order": "in pairs", "load_share": 0.97}],
        "tag": dict.fromkeys(("save_with", "save_without", "load_with", "load_without"), 1.0),
    }
    out = report(tmp_path, capsys, copy=copy)
    cells = "51.00 | 99.10% | 52.00 | {}% | 53.00 | 99.30% | {} | 54.00 | 97.40% | **missed** |"
    assert f"| 4 KiB | {cells.format('99.20', 'met')}" in out
    assert f"| 64 KiB, frames in pairs | {cells.format('97.00', '**missed**')}" in out
    assert (
        "| 8 KiB | 49.00 | 98.00% | 49.50 | 99.00% | 45.00 | 90.00% | **missed** | - | - |" in out
    )


@pytest.mark.parametrize(("load", "verdict"), [(80.0, "met"), (65.0, "**missed**")])
def test_the_report_compares_compressed_copies_with_raw_ones(
    load: float, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = {"page_bytes": 4096.0, "save": 50.0, "load": 52.0, "both": 45.0}
    copy = {
        "machine": {},
        "ceiling": dict.fromkeys(("save", "load", "both"), 50.0),
        "interference": [],
        "pages": [{**raw, "compressed": {"save": 75.0, "load": load, "both": 64.0}}],
        "tag": dict.fromkeys(("save_with", "save_without", "load_with", "load_without"), 1.0),
    }
    out = report(tmp_path, capsys, copy=copy)
    assert (
        f"| 4 KiB | 75.00 | 0.667 | {load:.2f} | {52 / load:.3f} | 64.00 | 0.703 | {verdict} |"
        in out
    )


@pytest.mark.parametrize(("last_ms", "verdict"), [(2010.0, "met"), (2020.0, "**missed**")])
def test_the_report_pools_every_cold_prompt(
    last_ms: float, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain vLLM takes 2 s for two prompts of 1,000 tokens and 2 s for a wave of 4,000 tokens. With
    kvloft, these requests take 0.26% or 0.51% longer.
    """

    def engine(*times_ms: float) -> dict[str, Any]:
        waves = [{"makespan_ms": times_ms[-1], "mean_ms": 1.0}]
        return {
            "ttft": {"context": 1000},
            "cold": {"all_ms": times_ms[:-1]},
            "wave": {"cold": waves},
        }

    out = report(
        tmp_path,
        capsys,
        engine={"none": engine(900.0, 1100.0, 2000.0), "kvloft": engine(1050.0, 950.5, last_ms)},
    )
    (line,) = (text for text in out.splitlines() if text.startswith("| cold prefill, single"))
    assert line.startswith(
        "| cold prefill, single and together, tokens/s | 1,500 | 1,49"
    ) and line.endswith(f"| {verdict} |")


def test_the_report_has_every_part() -> None:
    spec = importlib.util.spec_from_file_location("gpu_report", REPORT)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    assert found.COLD_PARTS == engine.COLD_PARTS


def test_the_report_compares_rates_of_the_same_work_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def engine(one_ms: float, wave_ms: float | None, finished: int = 8) -> dict[str, Any]:
        wave = {
            "cold": [{"makespan_ms": wave_ms, "mean_ms": 1.0, "finished": finished}],
            "cold_makespan_ms": wave_ms,
        }
        return {
            "cold": {"context": 1000, "cold_ms": one_ms, "all_ms": [one_ms]},
            **({"wave": wave} if wave_ms else {}),
        }

    good = engine(1000.0, 4000.0)
    for none, ours in (
        (engine(1000.0, None), engine(1050.0, 4400.0)),  # plain vLLM failed before its waves
        (good, engine(1050.0, None)),
        (good, {"wave": good["wave"]}),
        (good, engine(1000.0, 1500.0, 3)),  # this wave hung
    ):
        out = report(
            tmp_path,
            capsys,
            engine={"none": none, "kvloft": ours},
            engine_again_1={"none": good, "kvloft": ours},
        )
        assert "cold prefill, single" not in out and "| median" not in out
    assert "cold prefill, single" in report(tmp_path, capsys, engine={"none": good, "kvloft": good})


def test_the_report_names_and_counts_a_failed_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def engine(context: int) -> dict[str, Any]:
        waves = {"cold": [{"makespan_ms": 4000.0, "mean_ms": 1.0}], "cold_makespan_ms": 4000.0}
        return {"cold": {"context": context, "cold_ms": 1000.0, "all_ms": [1000.0]}, "wave": waves}

    same = {"none": engine(32768), "kvloft": engine(32768)}
    died = {**same, "kvloft": {"error": "ended with -11; the end of x:\nCUDA error"}}
    out = report(tmp_path, capsys, engine=same, engine_again_1=same, engine_again_2=died)
    assert "**kvloft failed** (`engine_again_2.json`): ended with -11; the end of x:" in out
    assert (
        "| failed runs of kvloft: 1 | **missed** | **missed** | **missed** |" in out
        and "| median" not in out
    )
    (tmp_path / "engine_again_2.json").unlink()
    out = report(
        tmp_path, capsys, engine=same, engine_again_1={"none": engine(4096), "kvloft": engine(4096)}
    )
    assert "runs, each with new processes" not in out, "there is one run per length"


def test_the_report_shows_the_parts_of_a_cold_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {"before_ms": 11.0, "gpu_ms": 1222.0, "between_ms": 2.0, "after_ms": 3.0}
    wave = {"cold_makespan_ms": 4000.0, "cold_parts": {**parts, "gpu_ms": 3900.0}}
    none = {"cold": {"cold_ms": 1236.0, **parts}, "wave": wave}
    out = report(
        tmp_path, capsys, engine={"none": none, "native": {"cold": {"cold_ms": 1300.0}}}
    ).splitlines()
    for whole, gpu in (
        ("TTFT for 32,768 tokens, cold", "1,222.00"),
        ("8 x 16k together, cold: makespan", "3,900.00"),
    ):
        at = next(i for i, line in enumerate(out) if line.startswith(f"| {whole}"))
        assert out[at + 1 : at + 5] == [
            "| - until the first forward pass | 11.00 | - |  |  |",
            f"| - first to last forward pass | {gpu} | - |  |  |",
            "| - gaps between the forward passes | 2.00 | - |  |  |",
            "| - until the token is available | 3.00 | - |  |  |",
        ]


@pytest.mark.parametrize(
    ("warm", "verdict"), [([110.0, 205.0, 900.0], "met"), ([111.0, 212.0, 318.0], "**missed**")]
)
def test_the_report_pairs_a_warm_prompt_with_the_hit_right_after_it(
    warm: list[float], verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The link takes 100 ms, and the hits take 10, 100 and 200 ms.

    The report contains the median of the three ratios.
    """
    ttft = {"kv_bytes": 5e9, "all_ms": {"warm": warm, "hbm": [10.0, 100.0, 200.0]}}
    copy = {
        "machine": {},
        "ceiling": {"save": 50.0, "load": 50.0, "both": 50.0},
        "pages": [],
        "interference": [],
        "tag": dict.fromkeys(("save_with", "save_without", "load_with", "load_without"), 1.0),
    }
    out = report(tmp_path, capsys, copy=copy, engine={"kvloft": {"ttft": ttft}})
    (line,) = (
        text
        for text in out.splitlines()
        if text.startswith("Ratio of each warm TTFT to its lower bound (100.0 ms")
    )
    assert f"target 1.05; {verdict})" in line


@pytest.mark.parametrize(
    ("last", "verdicts"),
    [(1.004, ["met", "met", "met"]), (1.006, ["**missed**", "**missed**", "**missed**"])],
)
def test_the_report_takes_the_median_of_runs_with_new_processes(
    last: float, verdicts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In three runs, kvloft takes 0.9, 1.02 and ``last`` times as long as plain vLLM.

    A fourth run has no plain engine and is ignored.
    """

    def engine(times: float) -> dict[str, Any]:
        one, wave = 1000.0 * times, 4000.0 * times
        waves = {"cold": [{"makespan_ms": wave, "mean_ms": 1.0}], "cold_makespan_ms": wave}
        return {"cold": {"context": 1000, "cold_ms": one, "all_ms": [one]}, "wave": waves}

    runs = [{"none": engine(1.0), "kvloft": engine(times)} for times in (0.9, 7.0, 1.02, last)]
    del runs[1]["none"]
    out = report(
        tmp_path,
        capsys,
        engine=runs[0],
        **{f"engine_again_{i}": run for i, run in enumerate(runs[1:])},
    ).splitlines()
    assert "| 2 | 1.0200 | 1.0200 | 0.9804 |" in out and not any(
        line.startswith("| 4 ") for line in out
    )
    (line,) = (text for text in out if text.startswith("| median"))
    numbers = (last, last, 1 / last)
    cells = (f"{number:.4f} {verdict}" for number, verdict in zip(numbers, verdicts, strict=True))
    assert line == f"| median | {' | '.join(cells)} |"


def test_the_report_compares_one_process_with_its_connector_and_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def kind(without_ms: float, with_ms: float) -> dict[str, Any]:
        return {
            "detached": {"ms": without_ms, "gpu_ms": without_ms - 20, "all_ms": [1, 2]},
            "attached": {"ms": with_ms, "gpu_ms": with_ms - 23, "all_ms": [1, 2]},
        }

    measured: dict[str, Any] = {
        "attached": {"context": 32768, "prompts": kind(1000, 1005), "waves": kind(4000, 4021)}
    }
    measured["attached"]["waves"]["detached"]["between_ms"] = 6.0
    out = report(tmp_path, capsys, engine_attached={"kvloft": measured})
    assert "in one process of kvloft" in out
    assert "| TTFT for 32,768 tokens (2 runs) | 1,000.00 | 1,005.00 | 1.005: 1.0050 | met |" in out
    assert (
        "| 8 x 16k together: makespan (2 runs) | 4,000.00 | 4,021.00 | 1.005: 1.0052 | **missed** |"
        in out
    )
    assert "| - first to last forward pass | 980.00 | 982.00 | | |" in out
    assert "gaps between the forward passes" not in out, "not measured for both engines"
    del measured["attached"]["waves"]["attached"]["ms"]
    assert "one process" not in report(
        tmp_path, capsys, engine_attached={"kvloft": measured, "native": {"error": "died"}}
    )


def test_the_report_has_a_row_for_each_launch_that_was_profiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ncu.txt").write_text(
        "==PROF== Connected to process 7\n"
        "  gather_chunks (66, 1, 1)x(512, 1, 1), Context 1, Stream 13, Device 0, CC 9.0\n"
        "    Memory Throughput                 %        26.60\n"
        "    DRAM Throughput                   %        26.50\n"
        "    Duration                         us        47.68\n"
        "    Compute (SM) Throughput           %        13.82\n"
        "    Memory Throughput           Tbyte/s         1.28\n"
        "    Achieved Occupancy                        %        24.99\n"
        "  scatter_chunks (66, 1, 1)x(512, 1, 1), Context 1, Stream 15, Device 0, CC 9.0\n"
        "    Duration                         us     1,053.09\n"
    )
    out = report(tmp_path, capsys, nothing={})
    assert "| `gather_chunks` | 66 | 47.68 us | 26.50 | 13.82 | 24.99 |" in out
    assert "| `scatter_chunks` | 66 | 1,053.09 us | - | - | - |" in out


def test_the_report_compares_chats_with_the_fastest_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def runs(*seconds: float) -> dict[str, Any]:
        return {
            "runs": [
                {
                    "makespan_s": s,
                    "unfinished": 0,
                    "known_tokens": 4,
                    "cached_tokens": 3,
                    "preemptions": 2,
                }
                for s in seconds
            ]
        }

    cut_off = {
        "runs": [{"makespan_s": 1.0, "unfinished": 5}],
        "error": "5 turns were not answered in time",
    }
    found = report(
        tmp_path,
        capsys,
        chats={
            "none": runs(59.0),
            "native": cut_off,
            "pegaflow": runs(34.0, 33.0),
            "kvloft": runs(33.4),
        },
    )
    assert (
        "| kvloft | 33.4 | 33.4 | 75.0% | 2 | at most 33.5 (fastest other engine): met |" in found
    )
    assert "| native | - | - | - | - | 5 turns" in found, "an interrupted run has no makespan"
    assert "**missed**" in report(
        tmp_path, capsys, chats={"none": runs(30.0), "kvloft": runs(33.4)}
    )


@pytest.mark.parametrize(("failed", "verdict"), [(0, "met"), (1, "**missed**")])
def test_the_report_counts_saves_that_failed_at_start(
    failed: int, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    startup = {
        "rows": [{"at_s": 10.1}],
        "pinned_gib": 42.0,
        "saved_chunks": 9000,
        "failed_chunks": failed,
    }
    assert f"{failed:,} failed (target: 0; {verdict})" in report(
        tmp_path, capsys, engine_startup={"kvloft": {"startup": startup}}
    )


@pytest.mark.parametrize(
    ("ours", "problems", "verdict"),
    [(12, [], "met"), (13, [], "**missed**"), (1, ["tokens differ"], "**missed**")],
)
def test_the_report_compares_preemptions_of_a_crowd(
    ours: int, problems: list[str], verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"run": "crowd cold", "equal": 1, "total": 1, "loaded": 0, "differing": 0}
    setups = {
        name: {"what": name, "runs": [{**row, "preemptions": count}]}
        for name, count in (("plain-pc", 10), ("hnd", ours))
    }
    crowd = {"setups": setups, "problems": problems}
    assert f"tokens equal; {verdict})" in report(tmp_path, capsys, equality_crowd=crowd)


def test_known_prompts_are_judged_by_the_link_and_hbm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"context": 32768, "cold_ms": 700.0, "hbm_ms": 100.0, "warm_ms": 125.0}
    engines = {
        "none": {"kv_blocks": 9, "ttft": {**times, "warm_ms": 0.0}},
        "groups": {"kv_blocks": 9, "ttft": {**times, "warm_of_bound": 1.06}},
    }
    said = report(tmp_path, capsys, engine_known_gemma3=engines)
    assert "| gemma3, groups | 32768 | 700.0 | 100.0 | 125.0 | 1.060 | **missed** | 9 |" in said


@pytest.mark.parametrize(("ours", "verdict"), [(70.0, "met"), (70.5, "**missed**")])
def test_the_report_compares_our_server_with_the_fastest_other(
    ours: float, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = {"served": ours, "pegaflow": 70.0, "lmcache-server": 90.0}
    chats = {
        name: {
            "runs": [
                {
                    "makespan_s": s,
                    "preemptions": 0,
                    "known_tokens": 4,
                    "cached_tokens": 4,
                    "unfinished": 0,
                }
            ]
        }
        for name, s in peers.items()
    }
    died = {"dead": {"error": "its server did not get ready"}}
    out = report(
        tmp_path,
        capsys,
        chats_peers=chats,
        engine_peers={name: {"ttft": {"warm_ms": ms}} for name, ms in peers.items()} | died,
    )
    assert (
        f"served {ours:.1f}, pegaflow 70.0, lmcache-server 90.0 (target: kvloft's is the lowest; "
        f"{verdict})" in out
    )
    assert (
        f"| served | {ours:.1f} | {ours:.1f} | 100.0% | 0 | at most 70.0 (fastest other engine): "
        f"{verdict} |" in out
    )
    alone = report(tmp_path, capsys, engine_peers={"served": {"ttft": {"warm_ms": ours}}} | died)
    assert "other servers" not in alone


def test_the_report_shows_errors_of_a_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [{"loaded": 5, "loaded_differing": 0}, {"loaded": 4, "loaded_differing": 1}]
    out = report(
        tmp_path,
        capsys,
        ranks_pp2={
            "runs": {"warm": {"ranks": ranks}},
            "problems": ["rank 1 loaded other pages\nand more"],
        },
        ranks_tp2={"runs": {}, "problems": []},
        ranks_died={"error": "ended with 1", "problems": ["ended with 1"]},
    )
    assert "| ranks_pp2 | warm | 5, 4 | 0, 1 |" in out
    assert "- ranks_pp2: **missed**; rank 1 loaded other pages\n- ranks_tp2: met" in out
    assert "- ranks_died: **missed**; ended with 1" in out


def test_the_report_names_engines_with_tokens_left_in_hbm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If tokens remain in HBM, the measured time is not that of a full load from the server. The
    prompts between rounds should have evicted these tokens.
    """
    both = {
        name: {"warm_ms": 70.0, "cached_tokens": [96, 96], "from_connector": [96, 96]}
        for name in ("served", "pegaflow")
    }
    peers = {name: {"ttft": found} for name, found in both.items()}
    assert "left in HBM" not in report(tmp_path, capsys, engine_peers=peers)
    both["pegaflow"]["from_connector"] = [96, 32]
    out = report(tmp_path, capsys, engine_peers=peers)
    assert "pegaflow: **not all hits are from the server**" in out and "served: **not" not in out
