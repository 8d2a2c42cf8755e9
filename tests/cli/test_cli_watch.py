"""Tests `kvloft serve --metrics`, `kvloft status --watch` and examples/deploy with a real server
and the tools that read their output.
"""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import signal
import socket as socketlib
import struct
import subprocess
import sys
import tempfile
import termios
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from watched import save

from kvloft import _core
from kvloft.cli import metrics, watch
from kvloft.cli import status as status_command
from kvloft.cli.__main__ import main
from kvloft.cli.commands import build_parser
from kvloft.cli.tables import count_text, hit_rate, notes
from kvloft.counters import Scope, exported
from kvloft.errors import ConfigError, LateError

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
COUNTS = (
    "lookups",
    "lookup_chunks",
    "lookup_chunks_found",
    "load_chunks",
    "save_chunks",
    "late_calls",
    "late_chunks",
)
OF_VLLM = {
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:time_to_first_token_seconds_bucket",
}


def scrape(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_metrics_match_status(socket: str) -> None:
    url, end = metrics.serve(("127.0.0.1", 0), lambda: _core.server_status(socket))
    try:
        found, status = scrape(url), _core.server_status(socket)
    finally:
        end()
    assert (found["kvloft_commits_total"], found["kvloft_frames_visible"]) == (3, 3)
    assert (found["kvloft_engines"], found["kvloft_host_used_bytes"]) == (1, 3 * 4096)
    assert found["kvloft_build_info"] == 1
    (space,) = status["namespaces"]
    assert (
        (found["kvloft_slabs"], found["kvloft_host_bytes"])
        == (space["slabs"], status["host_bytes"])
        == (1, 1 << 20)
    )
    names = {
        f"kvloft_{m.name}{'' if m.is_gauge else '_total'}"
        for m in (*exported(Scope.NAMESPACE), *exported(Scope.SERVER))
    }
    assert names <= found.keys()


def test_silent_connections_to_the_metrics_are_closed_quietly(
    socket: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "IDLE_TIMEOUT_S", 0.1)
    url, end = metrics.serve(("127.0.0.1", 0), lambda: _core.server_status(socket))
    try:
        port = int(url.split(":")[2].split("/")[0])
        with socketlib.create_connection(("127.0.0.1", port), timeout=60) as silent:
            assert silent.recv(1) == b"", "the connection must be closed"
        assert scrape(url)["kvloft_engines"] == 1
    finally:
        end()
    assert capfd.readouterr().err == ""


def test_each_namespace_has_its_numbers_and_is_cleared_alone(
    socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = _core.Session.connect(socket, frame_bytes=8192, namespace=b"\x1a" * 32, timeout_s=60.0)
    save(other, [7, 8])
    url, end = metrics.serve(("127.0.0.1", 0), lambda: _core.server_status(socket))
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            text = answer.read().decode()
    finally:
        end()
    assert 'kvloft_frames_visible{namespace="0000000000000000"} 3.0' in text
    assert 'kvloft_frames_visible{namespace="1a1a1a1a1a1a1a1a"} 2.0' in text
    assert 'kvloft_host_used_bytes{namespace="1a1a1a1a1a1a1a1a"} 16384.0' in text
    assert main(["status", "--socket", socket]) == 0
    shown = capsys.readouterr().out
    assert shown.count("of 1 MiB host memory") == 2
    assert "namespace 1a1a1a1a1a1a1a1a" in shown
    for unclear in ([], ["--namespace", "2"]):
        assert main(["clear", "--socket", socket, "--yes", *unclear]) == 2
        assert "0000000000000000, 1a1a1a1a1a1a1a1a" in capsys.readouterr().err
    assert main(["clear", "--socket", socket, "--yes", "--namespace", "1A1A"]) == 0
    assert capsys.readouterr().out == "2 chunks removed\n"
    visible = [
        space["stats"]["frames_visible"] for space in _core.server_status(socket)["namespaces"]
    ]
    assert visible == [3, 0]
    other.close()


def test_before_the_first_engine_there_are_numbers_too() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="kv-") as folder,
        closing(_core.Server(f"{folder}/run/kv.sock", host_bytes=1 << 20)) as server,
    ):
        url, end = metrics.serve(("127.0.0.1", 0), server.status)
        try:
            assert scrape(url)["kvloft_engines"] == 0
            port = int(url.split(":")[2].split("/")[0])
            with pytest.raises(
                ConfigError,
                match=rf"cannot listen on 127\.0\.0\.1:{port} \(Address already in use\)",
            ):
                metrics.serve(("127.0.0.1", port), server.status)
        finally:
            end()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("9180", ("127.0.0.1", 9180)), ("[::]:1", ("::", 1)), ("0.0.0.0:80", ("0.0.0.0", 80))],
)
def test_only_this_machine_may_ask_unless_a_host_is_named(
    text: str, wanted: tuple[str, int]
) -> None:
    assert metrics.address(text) == wanted


@pytest.mark.parametrize("text", ["", "x", "localhost", "1:", "-1", "1e3"])
def test_an_address_without_a_port_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="has no valid port"):
        metrics.address(text)


@pytest.mark.parametrize("text", ["65536", "99999", "0.0.0.0:123456789"])
def test_a_port_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"'{text}': the port must be between 1 and 65535"):
        metrics.address(text)


@pytest.mark.parametrize("host", ["a..b", "nohost.invalid"])
def test_a_host_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="use another host or port"):
        metrics.serve((host, 0), dict)


@pytest.mark.parametrize(
    "option",
    [
        "--interval=0",
        "--interval=nan",
        "--interval=x",
        "--interval=61min",
        "--interval=50ms",
        "--count=0",
        "--count=-1",
    ],
)
def test_watch_reports_allowed_intervals_and_counts(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["status", "--watch", "--socket", "/nowhere/kv.sock", option])
    is_interval = option.startswith("--interval")
    expected = "an interval between 0.1s and 1h" if is_interval else "a positive integer"
    assert f"expected {expected}, " in capsys.readouterr().err


def test_interval_takes_times_as_other_options_do() -> None:
    parser = build_parser("status")
    intervals = [
        parser.parse_args(["status", f"--interval={text}"]).interval
        for text in ("2", "0.5", "500ms", "2s", "1h")
    ]
    assert intervals == [2.0, 0.5, 0.5, 2.0, 3600.0]


def test_watch_shows_tiers_engines_and_rates(
    socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--watch", "--socket", socket, "--count", "2", "--interval", "0.1"]) == 0
    out = capsys.readouterr().out
    assert out.count("tier") == 2, "without a terminal, every refresh is printed below the last"
    assert "saved" in out
    assert (
        main(
            ["status", "--watch", "--socket", socket, "--count", "2", "--interval", "0.1", "--json"]
        )
        == 0
    )
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    (first,), (second,) = first["namespaces"], second["namespaces"]
    assert (first["stats"]["frames_visible"], first["chunks_per_s"]) == (3, {})
    assert second["chunks_per_s"].keys() == watch.RATES.keys()
    assert (second["gb_per_s"], second["hit_rate"], second["hit_rate_now"]) == (
        {"loaded": 0.0, "saved": 0.0},
        None,
        None,
    )
    assert main(["status", "--watch", "--socket", f"{socket}.none"]) == 1
    assert "cannot connect to a kvloft server" in capsys.readouterr().err


@pytest.mark.parametrize("is_json", [False, True])
def test_watch_reports_a_late_answer_and_continues(
    socket: str, is_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([None, LateError("timed out"), LateError("timed out"), None])
    real = _core.server_status

    def status(path: str, **options: Any) -> dict[str, Any]:
        answer = next(answers)
        if answer is not None:
            raise answer
        return real(path, **options)

    monkeypatch.setattr(_core, "server_status", status)
    options = ["--count", "4", "--interval", "0.1", *(["--json"] if is_json else [])]
    assert main(["status", "--watch", "--socket", socket, *options]) == 0
    out, late = (
        capsys.readouterr().out,
        "The server has not responded for 0 s; it is stopped or busy.",
    )
    if not is_json:
        assert [out.count(text) for text in (late, "all engines", "per second")] == [2, 2, 2], (
            "rates must include late refreshes"
        )
        return
    first, *rows, last = map(json.loads, out.splitlines())
    assert rows == [{"problems": [late]}] * 2
    assert (
        first["namespaces"][0]["chunks_per_s"] == {}
        and last["namespaces"][0]["chunks_per_s"].keys() == watch.RATES.keys()
    )


def test_watch_waits_for_a_server_that_does_not_answer_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "TIMEOUT_S", 0.2)
    with socketlib.socket(socketlib.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent.sock"))
        silent.listen()
        assert (
            main(
                [
                    "status",
                    "--watch",
                    "--socket",
                    str(tmp_path / "silent.sock"),
                    "--count",
                    "2",
                    "--interval",
                    "0.1",
                ]
            )
            == 0
        )
    captured = capsys.readouterr()
    assert captured.out.count("The server has not responded") == 2 and captured.err == ""


def test_watch_shows_the_last_state_below_a_late_answer(
    socket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        watch, "Console", lambda: Console(width=80, height=24, file=screen, force_terminal=True)
    )
    monkeypatch.setenv("TERM", "xterm")
    answers = iter([_core.server_status(socket), LateError("timed out")])

    def status(_: str, **__: Any) -> dict[str, Any]:
        answer = next(answers)
        if isinstance(answer, LateError):
            raise answer
        return answer

    monkeypatch.setattr(_core, "server_status", status)
    assert main(["status", "--watch", "--socket", socket, "--count", "2", "--interval", "0.1"]) == 0
    last = screen.getvalue().rpartition("The server has not responded")[2]
    assert "all engines" in last


def test_watch_shows_the_late_answers_that_engines_counted(socket: str) -> None:
    status = _core.server_status(socket)
    status["namespaces"][0]["stats"] |= {"late_calls": 7, "late_chunks": 12}
    drawn = Console(width=150, record=True, file=io.StringIO())
    drawn.print(watch.picture(status, {}))
    assert "Late responses: 7; delayed saves: 12 chunks." in drawn.export_text()


def test_hit_rates_are_shown_per_engine_and_in_total(
    socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = _core.Session.connect(socket, frame_bytes=4096, namespace=bytes(32), timeout_s=60.0)
    chain = _core.KeyChain(bytes(32), block_tokens=1)
    chain.append_tokens([1, 2, 3, 4])
    for _ in range(2):
        assert other.lookup(chain) == (3, 3)
    lease = other.acquire(chain)
    lease.batch([[5, 6, 7]], 0, 3)
    assert main(["status", "--socket", socket, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (space,) = shown["namespaces"]
    told = [{name: engine[name] for name in COUNTS} for engine in space["engines"]]
    assert told == [
        dict(zip(COUNTS, counts, strict=True))
        for counts in ([0, 0, 0, 0, 3, 0, 0], [2, 8, 6, 3, 0, 0, 0])
    ]
    assert [space["stats"][name] for name in COUNTS] == [2, 8, 6, 3, 3, 0, 0]
    assert space["hit_rate"] == 0.75
    assert main(["status", "--socket", socket]) == 0
    assert capsys.readouterr().out.count("75.0%") == 3, (
        "for the engine with late results and for all engines, but not for the other engine"
    )
    before = _core.server_status(socket)
    known = _core.KeyChain(bytes(32), block_tokens=1)
    known.append_tokens([1, 2])
    other.lookup(known)
    drawn = Console(width=150, record=True)
    drawn.print(watch.picture(_core.server_status(socket), {}, before))
    (of_all,) = [line for line in drawn.export_text().splitlines() if "all engines" in line]
    assert of_all.split()[2:] == ["3", "10", "8", "80.0%", "100.0%", "3", "3"]
    other.close()


@pytest.mark.parametrize(
    ("late", "said"), [((0, 0), None), ((2, 0), ["2", "0"]), ((1, 1200), ["1", "1,200"])]
)
def test_saves_that_a_late_answer_cost_are_shown_with_the_way_out(
    late: tuple[int, int], said: list[str] | None
) -> None:
    lines = notes({"stats": dict(zip(("late_calls", "late_chunks"), late, strict=True))}, [])
    assert [re.findall(r": ([\d,k.]+)(?:;| chunks)", line) for line in lines] == (
        [] if said is None else [said]
    )
    assert all("server_timeout" in line for line in lines)


def test_shares_are_shown_if_set(capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        path = f"{folder}/run/kv.sock"
        with closing(_core.Server(path, host_bytes=1 << 20, shares=[("01", 25)])):
            engines = [
                _core.Session.connect(
                    path, frame_bytes=4096, namespace=bytes([n] * 32), timeout_s=60.0
                )
                for n in (1, 2)
            ]
            for command in (["status"], ["status", "--watch", "--count", "1"]):
                assert main([*command, "--socket", path]) == 0
                titles = [
                    line for line in capsys.readouterr().out.splitlines() if " host memory" in line
                ]
                assert [title.endswith(" host memory, share 25%") for title in titles] == [
                    True,
                    False,
                ]
            assert [engine.stats()["host_share_bytes"] // 4096 for engine in engines] == [64, 192]
            for engine in engines:
                engine.close()


def test_large_numbers_fit_80_columns_and_watch_uses_the_same_words(socket: str) -> None:
    status = _core.server_status(socket)
    (space,) = status["namespaces"]
    space["stats"] = dict.fromkeys(space["stats"], 999_999) | {
        "disk_broken": 1,
        "share_percent": 100,
    }
    space["slabs"] = 1 << 22
    (engine,) = space["engines"]
    space["engines"] = [dict.fromkeys(engine, 999_999) | {"pid": 4_194_304}]
    rates = {space["namespace"]: dict.fromkeys(watch.RATES, 1_234_567.0)}
    none = dict.fromkeys(COUNTS, 0)
    before = status | {
        "namespaces": [space | {"stats": none, "engines": [none | {"pid": 4_194_304}]}]
    }
    consoles = [Console(width=80, record=True, file=io.StringIO()) for _ in range(2)]
    consoles[0].print(watch.picture(status, rates, before))
    status_command._print(status | {"namespaces": [space]}, socket, consoles[1])
    heads = []
    for console in consoles:
        lines = [line.rstrip() for line in console.export_text().splitlines()]
        assert not any("…" in line or len(line) > 80 for line in lines)
        rows = [
            line.split()[0]
            for line in lines
            if line.startswith(("host  ", "disk  ", "process", "all"))
        ]
        assert rows == ["host", "disk", "all", "process", "process"], "each row is one line"
        heads.append(
            [
                line.replace(" now", "").split()
                for line in lines
                if line.startswith(("tier ", "engine ", "chunks "))
            ]
        )
    assert heads[0] == heads[1]
    assert len(heads[0]) == 3


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999_999, "999,999"),
        (1_000_000, "1 M"),
        (1_234_567, "1.23 M"),
        (999_600_000, "1 G"),
        (10**14, "100 T"),
    ],
)
def test_a_count_is_short(number: int, text: str) -> None:
    assert count_text(number) == text


@pytest.mark.parametrize(("num_engines", "num_more"), [(1, 0), (2, 3), (9, 17)])
def test_watch_fits_24_rows_or_lists_hidden_parts(
    socket: str, num_engines: int, num_more: int
) -> None:
    status = _core.server_status(socket) | {"settings": {"salt_quota": "10%"}}
    (space,) = status["namespaces"]
    space["engines"] *= num_engines
    console = Console(width=80, height=24, record=True, file=io.StringIO(), force_terminal=True)
    rates = {space["namespace"]: dict.fromkeys(watch.RATES, 1.0)}
    console.print(watch.fitted(watch.picture(status, rates, status), console))
    lines = console.export_text().splitlines()
    assert len(lines) == 24
    assert all(any(name in line for line in lines) for name in watch.RATES), "a rate is missing"
    assert any(line.startswith("all engines") for line in lines)
    told = [f"{num_more} more rows: make the window taller, or use --json"] if num_more else []
    assert [line for line in lines if "more rows" in line] == told
    assert not num_more or lines[-1] == told[0]


def drawn_on_terminal(socket: str, term: str) -> bytes:
    """Return the output of two refreshes on a terminal of the given type with 24 rows."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    argv = [
        sys.executable,
        "-m",
        "kvloft.cli",
        "status",
        "--watch",
        "--socket",
        socket,
        "--count",
        "2",
        "--interval",
        "100ms",
    ]
    env = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")
    } | {"TERM": term}
    with (
        open(ours, "rb", buffering=0) as screen,
        subprocess.Popen(argv, stdin=its, stdout=its, stderr=its, env=env) as process,
    ):
        os.close(its)
        drawn = b""
        with contextlib.suppress(OSError):  # reading fails once the other end is closed
            while part := screen.read(1 << 16):
                drawn += part
        assert process.wait(timeout=120) == 0
    return drawn


def test_watch_lists_hidden_parts_on_24_rows(socket: str) -> None:
    others = [
        _core.Session.connect(socket, frame_bytes=4096, namespace=bytes(32), timeout_s=60.0)
        for _ in range(3)
    ]
    assert b"more rows: make the window taller, or use --json" in drawn_on_terminal(socket, "xterm")
    for other in others:
        other.close()


def test_watch_prints_looks_one_after_the_other_on_a_dumb_terminal(socket: str) -> None:
    drawn = drawn_on_terminal(socket, "dumb")
    assert (drawn.count(b"all engines"), drawn.count(b"\x1b")) == (2, 0)


@pytest.mark.parametrize("option", ["--interval=1s", "--count=1"])
def test_options_of_watch_need_it(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--socket", "/nowhere/kv.sock", option]) == 2
    assert capsys.readouterr().err == "kvloft: --interval and --count require --watch.\n"


def test_a_disk_that_a_server_cannot_have_is_shown(
    socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        disk, path = str(Path(socket).parents[1] / "disk"), f"{folder}/run/kv.sock"
        settings = {"disk_path": disk}
        with closing(
            _core.Server(
                path, host_bytes=1 << 20, disk_path=disk, disk_bytes=1 << 20, settings=settings
            )
        ) as server:
            assert f"disk_path {disk} is in use by process {os.getpid()}" in str(
                server.disk_trouble()
            )
            said = f"The disk {disk} is not in use: {server.disk_trouble()}."
            for has_engine in (False, True):
                if has_engine:
                    engine = _core.Session.connect(
                        path, frame_bytes=4096, namespace=bytes(32), timeout_s=60.0
                    )
                for command in (["status"], ["status", "--watch", "--count", "1"]):
                    assert main([*command, "--socket", path]) == 0
                    shown = " ".join(capsys.readouterr().out.split())
                    assert said in shown and "paused" not in shown, (
                        "a directory owned by another process is not a failure"
                    )
            assert engine.stats()["disk_broken"] == 1, "its store has no disk tier either"
            engine.close()
    assert main(["status", "--socket", socket]) == 0
    assert "not used" not in capsys.readouterr().out


def test_a_hit_rate_is_of_the_time_between_and_of_one_server() -> None:
    old, new = (
        {"lookup_chunks": 10, "lookup_chunks_found": 5},
        {"lookup_chunks": 14, "lookup_chunks_found": 8},
    )
    assert (hit_rate(old), hit_rate(new, old)) == (0.5, 0.75)
    assert (hit_rate(old, old), hit_rate(old, new)) == (None, None)
    stats = {"frames_total": 9, "frames_free": 2, "host_used_bytes": 14_000_000}
    space = {"stats": stats, "frame_sizes": [1]}
    assert watch.gb_per_s({"loaded": 1000.0, "saved": 500.0, "found": 1.0}, space) == {
        "loaded": 2.0,
        "saved": 1.0,
    }


def test_fields_of_a_namespace_are_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    fields = {
        "model": "a/model",
        "empty": "",
        "dtype": "bfloat16",
        "nothing": "None",
        "window": "[4, 5]" * 30,
    }
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        path = f"{folder}/run/kv.sock"
        with closing(_core.Server(path, host_bytes=1 << 20)):
            engines = [
                _core.Session.connect(
                    path,
                    frame_bytes=4096,
                    namespace=bytes([nth] * 32),
                    timeout_s=60.0,
                    description=text,
                )
                for nth, text in enumerate([json.dumps(fields), "[a user's own]"])
            ]
            assert main(["status", "--verbose", "--socket", path]) == 0
            lines = capsys.readouterr().out.splitlines()
            for engine in engines:
                engine.close()
    assert [line.split() for line in lines if line.startswith("model")] == [
        ["model", "a/model", "dtype", "bfloat16"]
    ]
    assert "[a user's own]" in lines and not any(
        "empty" in line or "nothing" in line for line in lines
    )
    assert max(map(len, lines)) <= 80 and "".join(lines).replace(" ", "").count("[4,5]") == 30


def test_ctrl_c_ends_watch_with_status_0(socket: str) -> None:
    def heed() -> None:
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # background jobs of a shell ignore SIGINT, and this process may be such a job

    argv = [sys.executable, "-m", "kvloft.cli", "status", "--watch", "--json", "--socket", socket]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=120)[1] == b""
        assert process.returncode == 0


def test_a_stopped_server_is_not_reported_as_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socketlib.socket(socketlib.AF_UNIX) as stands:
        stands.bind(str(tmp_path / "stands.sock"))
        stands.listen()
        assert main(["status", "--socket", str(tmp_path / "stands.sock")]) == 1
    said = capsys.readouterr().err
    assert (
        "timed out; the server process is stopped or busy, and may still execute the command"
        in said
    )
    assert "start one" not in said


def test_rates_are_of_the_time_between_and_never_of_two_stores() -> None:
    names = dict.fromkeys(watch.RATES.values(), 10)

    def look(name: bytes, stats: dict[str, int]) -> dict[str, Any]:
        return {"namespaces": [{"namespace": name, "stats": stats}]}

    old, new = look(b"a", names), look(b"a", names | {"commits": 30})
    assert watch.rates_of(new, 4.0, old) == {
        b"a": {shown: 5.0 if shown == "saved" else 0.0 for shown in watch.RATES}
    }
    assert watch.rates_of(old, 4.0, new) == {}
    opening = look(b"a", {})  # a namespace that is being opened has no counters yet
    assert watch.rates_of(opening, 4.0, opening) == {}
    assert watch.rates_of(look(b"b", names), 4.0, old) == {}


def test_dashboard_and_alerts_use_existing_metrics(socket: str) -> None:
    url, end = metrics.serve(("127.0.0.1", 0), lambda: _core.server_status(socket))
    try:
        of_server = set(scrape(url))
    finally:
        end()
    of_engine = {"vllm:kvloft_build_info"} | {
        f"vllm:kvloft_{metric.name}{'' if metric.is_gauge else '_total'}"
        for metric in exported(Scope.ENGINE)
    }
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    panels = dashboard["panels"]
    alerts = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    asked += [rule["expr"] for rule in alerts]
    asked += [
        variable["query"]
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    ]
    assert len(asked) > 40
    for expression in asked:
        names = set(re.findall(r"vllm:\w+|(?<!:)\bkvloft_\w+", expression))
        assert names, expression
        assert names <= of_server | of_engine | OF_VLLM, expression
