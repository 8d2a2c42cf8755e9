"""Tests `kvloft check` without vLLM: its arguments, engine exits, the comparison of outputs, and
its report.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloft.cli import check_engine
from kvloft.cli.__main__ import main
from kvloft.cli.check_report import compare, make_report
from kvloft.cli.commands import split_flags

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Use fake engines, and create temporary directories in a directory that must be empty after
    the test.
    """
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(check_engine, "MODULE", "fake_engine")
    monkeypatch.setenv("PYTHONPATH", HERE)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr("kvloft.cli.check.vllm_version", lambda: "0.0")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    yield
    assert not list(temporary.iterdir()), "the temporary directory was not removed"


def test_flags_of_vllm_follow_the_first_dashes() -> None:
    assert split_flags(["check", "m", "--json", "--", "--dtype", "float32", "--"]) == (
        ["check", "m", "--json"],
        ["--dtype", "float32", "--"],
    )
    assert split_flags(["inspect", "--", "-dir"]) == (["inspect", "--", "-dir"], [])


def test_a_served_model_is_a_table_and_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "good", "--", "--port", "80"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("kvloft supports good with these flags")
    assert "16 of 20 prompt tokens from host memory, 16 of 20 from disk" in out
    assert "ignored API server flags: --port 80" in out
    assert "vLLM with kvloft again: disk" in err


def test_json_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "good", "--json", "--extra", '{"kv_groups": "all"}']) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["served"], report["missing"], report["extra"]) == (
        True,
        [],
        {"kv_groups": "all"},
    )
    assert [one["name"] for one in report["passes"]] == [
        "plain",
        "own",
        "cold",
        "host",
        "fork",
        "disk",
        "reset",
    ]
    assert set(report["engines"]) == {"alone", "with kvloft", "with kvloft again"}


def test_a_wrong_answer_is_status_1_with_its_place_in_the_last_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "wrong"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("With these flags, kvloft does NOT support wrong")
    assert "kvloft, disk, new engine: 1 of 1 outputs differ" in last


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_reader_that_leaves_early_does_not_make_it_served(
    more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as lines:
        monkeypatch.setattr("sys.stdout", lines)
        assert main(["check", "wrong", *more]) == 1


def test_a_refusal_is_status_1_and_has_kvlofts_own_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "refused"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(
        "vLLM did not run with kvloft: kvloft serves no such thing; run it without."
    )


def test_vllm_that_does_not_start_alone_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "never-starts"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "--- last lines of the log (vLLM alone)" in err
    assert err.splitlines()[-1].endswith("even without kvloft: ValueError: no such model")


@pytest.mark.parametrize("wrong", [["--extra", "{"], ["--extra", '{"hostsize": 1}']])
def test_a_wrong_setting_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    assert main(["check", "good", *wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "wrong", [[], ["good", "--time-limit", "1"], ["good", "--dtype", "float32"]]
)
def test_a_wrong_argument_is_status_2(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["check", *wrong])
    assert end.value.code == 2


class Hours:
    """Replaces `time`. All timeouts expire in the first sleep after an engine hangs, even if the
    engine started slowly.
    """

    def __init__(self, pids: Path) -> None:
        self._pids, self._passed_s = pids, 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._passed_s

    def sleep(self, seconds: float) -> None:
        self._passed_s = 7200.0 if hangs(self._pids) else 0.0
        time.sleep(seconds)


def hangs(pids: Path) -> bool:
    return pids.exists() and len(pids.read_text().split()) == 2


def test_an_engine_that_hangs_is_ended_with_all_its_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = check_engine.run_engine
    monkeypatch.setattr(
        "kvloft.cli.check.run_engine", lambda *a, **k: original(*a, **k | {"limit_s": 3000.0})
    )
    monkeypatch.setattr(check_engine, "time", Hours(tmp_path / "pids"))
    assert main(["check", "hangs", "--", str(tmp_path / "pids")]) == 1
    assert (
        "it did not finish within 3000 s (--time-limit); its last event was 'started'"
        in capsys.readouterr().out
    )
    assert_gone(int((tmp_path / "pids").read_text().split()[0]))


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_engines_and_removes_the_files(
    tmp_path: Path, sent: signal.Signals
) -> None:
    program = (
        # Background jobs of a shell ignore SIGINT, and this process may be such a job.
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from kvloft.cli import check, check_engine; from kvloft.cli.__main__ import main; "
        "check_engine.MODULE = 'fake_engine'; check.vllm_version = lambda: '0'; "
        "check.importlib.util.find_spec = lambda name: 1; "
        "sys.exit(main(sys.argv[1:]))"
    )
    pids = tmp_path / "pids"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "check", "hangs", "--", str(pids)],
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
    )
    while not hangs(pids):
        time.sleep(0.05)
    process.send_signal(sent)
    assert process.wait() == (130 if sent == signal.SIGINT else 143)
    assert_gone(int(pids.read_text().split()[0]))


def assert_gone(pid: int) -> None:
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        time.sleep(0.05)  # if this loop never ends, pytest's timeout fails the test


TRUE = {
    "prompt": 20,
    "tokens": [1, 2, 3],
    "clear": [[-0.1, 4.0, 9], [-0.7, 0.0005, 8], [-0.1, 4.0, 9]],
    "cached": 0,
    "host": 0,
    "disk": 0,
    "drafted": 20,
    "accepted": 10,
    "errors": 0,
    "damaged": 0,
    "blocks": [0],
}


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [
        ([1, 2, 3], "equal"),
        ([1, 8, 5], "near"),  # the second-best token, which is as good as the best token
        ([1, 7, 5], "wrong"),  # a token that is neither of the two best tokens
        ([9, 2, 3], "wrong"),  # the second-best token, which is clearly worse
        ([1, 2], "wrong"),  # an output that is too short
    ],
)
def test_answers_differ_by_rounding_only_between_equally_good_tokens(
    tokens: list[int], kind: str
) -> None:
    found = compare("host", {"p": TRUE | {"tokens": tokens}}, {"p": TRUE}, near=0.01)
    assert {name: getattr(found, name) for name in ("equal", "near", "wrong")} == {
        "equal": 0,
        "near": 0,
        "wrong": 0,
        kind: 1,
    }


def report(extra: dict[str, str] | None = None, /, **changes: dict[str, Any]) -> dict[str, Any]:
    """Return the report of a successful run.

    ``changes`` replaces the output of a pass or the properties of an engine.
    """
    good = {"host": {"host": 16}, "disk": {"disk": 16}}
    names = ("plain", "own", "cold", "host", "fork", "disk", "reset")
    told = [
        {"event": "pass", "name": n, "answers": {"p": TRUE | good.get(n, {}) | changes.get(n, {})}}
        for n in names
    ]
    facts = {"dtype": "float32", "groups": [{}, {}], "request_bytes": 1 << 20, "max_model_len": 100}
    starts = [
        {"event": "started", "facts": facts | changes.get(name, {})}
        for name in ("alone", "with kvloft")
    ]
    return make_report(
        [("alone", [starts[0], *told[:2]], None), ("with kvloft", [starts[1], *told[2:]], None)],
        {"model": "m", "extra": extra or {}, "ignored": []},
    )


def test_a_good_run_is_served_without_a_remark() -> None:
    assert (report()["missing"], report()["remarks"]) == ([], [])


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"host": {"host": 0}}, "no tokens were loaded from host memory"),
        ({"disk": {"disk": 0}}, "no tokens were loaded from disk"),
        ({"reset": {"host": 16}}, "from a cache that should be empty"),
        ({"cold": {"disk": 16}}, "from a cache that should be empty"),
        ({"fork": {"errors": 1}}, "1 errors in kvloft"),
        ({"fork": {"damaged": 1}}, "1 errors in kvloft"),
        (
            {"host": {"host": 16, "accepted": 6}},
            "6 draft tokens were accepted, compared with 10 for the same outputs without a hit",
        ),
        ({"host": {"host": 16, "tokens": [1, 8, 3]}}, "rounding changed every output"),
        (
            {"host": {"host": 16, "clear": [[-0.3, 4.0, 9]] * 3}},
            "log probabilities differ by up to 0.4",
        ),
    ],
)
def test_every_missing_requirement_is_named(changes: dict[str, Any], missing: str) -> None:
    found = report(**changes)
    assert not found["served"]
    assert any(missing in sentence for sentence in found["missing"]), found["missing"]


def test_more_gpu_memory_for_a_request_is_a_remark_with_the_setting_that_helps() -> None:
    found = report({"kv_groups": "one"}, **{"with kvloft": {"request_bytes": 4 << 20}})
    assert found["served"]
    assert (
        "a request with 100 tokens uses 4 MiB of GPU KV memory with kvloft, and 1 MiB without it"
        in found["remarks"][0]
    )
    assert "set kv_groups to auto" in found["remarks"][1]
