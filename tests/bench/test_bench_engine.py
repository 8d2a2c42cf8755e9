"""Tests `benches.gpu.engine` without a GPU.

The bench reports invalid arguments and missing hardware in one sentence, and an engine that crashes
does not affect the results of other engines. The measurements themselves run on a GPU.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benches.gpu import engine, equality, peers
from benches.gpu.child import result_of
from benches.gpu.engine import fit_together, run
from kvloft.bench import command
from kvloft.cli.__main__ import main
from kvloft.errors import UnsupportedError

MAINS = {
    "copy": lambda argv: main(["bench", "copy", *argv]),
    "engine": engine.main,
    "equality": equality.main,
}

CHILD = """
import json, sys
from pathlib import Path
from benches.gpu.turns import Turns
name, options = sys.argv[1], json.loads(sys.argv[2])
print("ASKED", sys.argv[2], flush=True)
print("RESULT", json.dumps({"name": name}), flush=True)
if name == "native":
    sys.exit("this one cannot start")
for phase in options["phases"]:
    print("PHASE", phase, flush=True)
    turns = Turns(Path(options["turns"]) / phase, name, options["names"], timeout_s=600)
    for _ in range(3):
        with turns.mine():
            pass
    turns.leave()
result = {"name": name, "cold": {"cold_ms": 1.5}, "totals": {"loads": 5, "bad_chunks": 0}}
print("RESULT", json.dumps(result), flush=True)
"""


@pytest.fixture
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the engines with child processes that take turns but measure nothing. The child
    "native" exits before its first turn.
    """

    def start(
        name: str, options: dict[str, Any], log: Path, gpu: int | None
    ) -> subprocess.Popen[bytes]:
        with log.open("w") as file:
            return subprocess.Popen(
                [sys.executable, "-c", CHILD, name, json.dumps(options)],
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    monkeypatch.setattr(engine, "_start", start)


def asked_of(log: Path) -> dict[str, Any]:
    """Return the options passed to the child process."""
    asked: dict[str, Any] = json.loads(log.read_text().split("ASKED ")[1].splitlines()[0])
    return asked


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.usefixtures("fake_engines")
def test_an_engine_that_dies_costs_only_its_own_row(tmp_path: Path, together: bool) -> None:
    said: list[str] = []
    found = run(
        connectors=("none", "native", "kvloft"),
        phases=("cold", "wave"),
        options={"num_blocks": 10},
        log_dir=tmp_path,
        timeout_s=600.0,
        together=together,
        progress=said.append,
    )
    assert list(found) == ["none", "native", "kvloft"]
    assert "this one cannot start" in found["native"]["error"]
    assert "error" not in found["none"]
    assert found["kvloft"]["cold"]["cold_ms"] == 1.5
    assert ("TTFT cold, ms", "1.50", "-", "1.50") in engine.table(found)


@pytest.mark.usefixtures("fake_engines")
def test_servers_start_together_and_one_that_cannot_costs_only_its_own_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    ready = (
        f"import time; open({str(started)!r}, 'w'); print({peers.LMCACHE_READY!r}, flush=True); "
        "time.sleep(6000)"
    )
    fails = (
        f"import os, time\nwhile not os.path.exists({str(started)!r}): time.sleep(0.01)\nraise "
        "SystemExit('no such pool')"
    )
    for name, program in {"lmcache-server": ready, "pegaflow": fails}.items():
        monkeypatch.setitem(
            peers.SERVERS, name, lambda _, program=program: ([sys.executable, "-c", program], {})
        )
    found = run(
        connectors=("pegaflow", "lmcache-server"),
        phases=("cold",),
        options={"num_blocks": 10},
        log_dir=tmp_path / "logs",
        timeout_s=600.0,
        together=True,
        progress=lambda _: None,
    )
    assert list(found) == ["pegaflow", "lmcache-server"]
    assert "no such pool" in found["pegaflow"]["error"] and "cold" not in found["pegaflow"]
    assert (
        found["lmcache-server"]["cold"]["cold_ms"] == 1.5 and "error" not in found["lmcache-server"]
    )
    assert asked_of(tmp_path / "logs/engine_lmcache-server.log")["floods"], (
        "a peer keeps blocks, so the bench must flood the cache"
    )


@pytest.mark.usefixtures("fake_engines")
def test_engines_that_take_too_long_are_killed_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        globals(), "CHILD", "import time; time.sleep(6000)"
    )  # longer than pytest's timeout
    found = run(
        connectors=("none", "kvloft"),
        phases=("cold",),
        options={"num_blocks": 10},
        log_dir=tmp_path,
        timeout_s=0.5,
        together=True,
        progress=lambda _: None,
    )
    assert all(
        "--timeout" in result["error"] and "empty" in result["error"] for result in found.values()
    )


@pytest.mark.usefixtures("fake_engines")
def test_decoding_is_measured_with_one_engine_at_a_time(tmp_path: Path) -> None:
    found = run(
        connectors=("none", "kvloft"),
        phases=("cold", "decode"),
        options={"num_blocks": 10},
        log_dir=tmp_path,
        timeout_s=600.0,
        together=True,
        progress=lambda _: None,
    )
    shared, alone = (asked_of(tmp_path / f"engine_kvloft{end}.log") for end in ("", "_alone"))
    assert not shared["floods"]
    assert (shared["names"], shared["phases"]) == (["none", "kvloft"], ["cold"])
    assert (alone["names"], alone["phases"]) == (["kvloft"], ["decode"])
    assert found["kvloft"]["totals"] == {"loads": 10, "bad_chunks": 0}, (
        "5 loads in each of its two processes"
    )
    assert not any("error" in result for result in found.values())


def test_without_a_connector_there_is_none_to_detach() -> None:
    names = ("none", "kvloft")
    found = engine._groups(names, ("cold", "attached"), together=True)
    assert found == [(["none", "kvloft"], ["cold"]), (["kvloft"], ["attached"])]
    assert engine._groups(names, ("attached",), together=True) == [(["kvloft"], ["attached"])]
    assert engine._groups(names, ("cold", "attached"), together=False) == [
        (["none"], ["cold"]),
        (["kvloft"], ["cold", "attached"]),
    ]


def test_every_phase_that_can_be_asked_for_can_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from benches.gpu.engine_child import PHASES

    with pytest.raises(SystemExit):
        engine.main(["--phases", "zzz"])
    said = capsys.readouterr().err.replace("'", "").splitlines()[-1]
    assert said.split("is not one of ")[1].split(", ") == list(PHASES)


def test_missing_measurements_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert engine._groups(("none",), ("attached",), together=False) == []
    monkeypatch.setattr(engine, "gpu_bytes", lambda: 150 << 30)
    assert (
        engine.main(["--connectors", "none", "--phases", "attached", "--logs", str(tmp_path)]) == 2
    )
    assert "nothing to measure" in capsys.readouterr().err


def test_the_last_result_counts_and_a_bad_end_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('RESULT {"a": 1}\nnoise\nRESULT {"a": 2}\nthe end')
    assert result_of(log, 0) == {"a": 2}
    assert "the end" in result_of(log, -9)["error"]


def test_engines_share_a_gpu_only_if_all_fit() -> None:
    assert fit_together(3, 9000, {}, 150 << 30)
    assert not fit_together(3, 9000, {}, 80 << 30)
    assert fit_together(1, 9000, {}, 80 << 30)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("engine --connectors foo", "'foo' is not one of none, native, kvloft"),
        ("engine --connectors kvloft,kvloft", "has a duplicate name"),
        ("engine --phases cold,foo", "'foo' is not one of"),
        ("engine --context 0", "not an integer"),
        ("engine --blocks x", "not an integer"),
        ("engine --kv-heads 7", "invalid choice"),
        ("engine --json /nowhere/x.json", "cannot be written"),
        ("equality --phases zzz", "'zzz' is not one of"),
        ("copy --mib 0", "not an integer"),
        ("copy --plot /nowhere/x.png", "cannot be written"),
        (f"copy --json {'x' * 300}", "cannot be written"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(
    argv: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        MAINS[argv.split()[0]](argv.split()[1:])
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_wrong_setup_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        equality.main(["--setups", "zzz"])
    assert "'zzz' is not one of reference, hnd" in capsys.readouterr().err


def test_a_wrong_copy_is_no_missing_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(**_: Any) -> None:
        raise RuntimeError("loaded pages differ from the saved pages")

    monkeypatch.setattr("kvloft.bench.command.gpu_bytes", lambda needed: 1)
    monkeypatch.setattr("kvloft.bench.copy.run", run)
    assert main(["bench", "copy"]) == 1
    assert "failed: loaded pages differ" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["copy", "engine", "equality"])
def test_without_a_gpu_no_engine_starts(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert MAINS[what]([]) == 2
    assert "cannot run on this machine" in capsys.readouterr().err


def test_without_vllm_the_sentence_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="torch and vllm cannot be imported"):
        command.gpu_bytes()
