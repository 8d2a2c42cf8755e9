"""Tests `kvloft config`: its output for users and for scripts, and its errors."""

import json
import re
from pathlib import Path

import pytest

from kvloft.cli.__main__ import main
from kvloft.config.table import KEYS

TWICE = '{"host_size": "1GiB", "host_size": "2GiB"}'


def test_table_names_every_key_with_value_and_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLOFT_HOST_SIZE", "2GiB")
    assert main(["config"]) == 0
    out = capsys.readouterr().out
    assert all(key in out for key in KEYS)
    row = next(line for line in out.splitlines() if "host_size" in line)
    assert "2GiB" in row
    assert "KVLOFT_HOST_SIZE" in row


def test_json_is_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["config", "--json", "--extra", '{"disk_path": "/cache", "disk_size": "1GiB"}']) == 0
    )
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == list(KEYS)
    assert shown["disk_size"] == {"value": 1 << 30, "from": "kv_connector_extra_config"}
    assert shown["eviction"] == {"value": "adaptive", "from": "default"}


@pytest.mark.parametrize(
    "extra",
    ["{", "[]", '{"host_size": "many"}', '{"hostsize": 1}', TWICE, "[" * 9000, f"[{'9' * 5000}]"],
)
def test_a_mistake_is_one_line_on_stderr_and_status_2(
    capsys: pytest.CaptureFixture[str], extra: str
) -> None:
    assert main(["config", "--extra", extra]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvloft: ")
    assert captured.err.count("\n") == 1
    assert len(captured.err) < 500


def test_brackets_in_a_value_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    extra = {"namespace": "[/x]", "disk_path": "/mnt/[cache]/kv"}
    assert main(["config", "--extra", json.dumps(extra)]) == 0
    shown = capsys.readouterr().out
    assert "[/x]" in shown and "/mnt/[cache]/kv" in shown


def test_a_long_value_is_shown_whole_without_a_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / ("long" * 40)
    assert main(["config", "--extra", json.dumps({"disk_path": str(path)})]) == 0
    shown = "".join(
        "".join(line.split("│")[2:3]).strip() for line in capsys.readouterr().out.splitlines()
    )
    assert str(path) in shown


def test_a_file_as_disk_path_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for path in (file, file / "below"):
        assert main(["config", "--extra", json.dumps({"disk_path": str(path)})]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"kvloft: disk_path = {path} (kv_connector_extra_config) ")
        assert f"{file} is a file" in captured.err
        assert captured.err.count("\n") == 1
    assert (
        main(["config", "--extra", json.dumps({"disk_path": str(tmp_path / "not" / "yet")})]) == 0
    )


def test_status_is_2_if_no_engine_starts(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ([], ["--json"]):
        for extra, text in (
            (
                '{"host_size": "900TiB"}',
                "kvloft: host_size = 900TiB (kv_connector_extra_config) is more than this ",
            ),
            (
                '{"disk_path": "/proc/nope"}',
                (
                    "kvloft: disk_path = /proc/nope (kv_connector_extra_config) cannot be created, "
                    "because /proc is not writable;"
                ),
            ),
        ):
            assert main(["config", *flags, "--extra", extra]) == 2
            captured = capsys.readouterr()
            assert captured.out == ""
            assert captured.err.startswith(text)
            assert captured.err.count("\n") == 1
        assert main(["config", *flags, "--extra", '{"host_size": "4KiB"}']) == 0
        assert capsys.readouterr().err == ""


def test_a_duplicate_setting_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--extra", '{"host_size": "1GiB", "host_size": "2GiB"}']) == 2
    assert capsys.readouterr().err == "kvloft: --extra sets host_size twice; remove one.\n"


def test_a_warning_is_no_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--extra", '{"host_size": "32000"}']) == 0
    assert capsys.readouterr().err == (
        "kvloft: warning: host_size = 32000 (kv_connector_extra_config) has no unit, so it is read "
        "as bytes; did you mean 32000MiB?\n"
    )


def test_checks_that_need_an_engine_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--extra", '{"disk_threads": 1}']) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "whether disk_path is in use" in out


@pytest.mark.parametrize("command", [[], ["config"], ["inspect"], ["verify"]])
def test_help_is_written_for_people(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--help"])
    assert exit_.value.code == 0
    assert "`" not in capsys.readouterr().out


COMMANDS = [
    "config",
    "size",
    "check",
    "serve",
    "status",
    "clear",
    "evict",
    "inspect",
    "verify",
    "bench",
]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS), ["bench", "copy"]])
def test_help_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if len(line) > 80] == []
    if not command:
        assert re.findall(r"^    (\w+)", out, re.MULTILINE) == COMMANDS, (
            "the list above must be complete"
        )


def test_server_memory_is_not_shown_as_the_engines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLOFT_HOST_SIZE", "2GiB")
    for server, is_void in (("unix:/run/kvloft/kv.sock", True), ("auto", False)):
        monkeypatch.setenv("KVLOFT_SERVER", server)
        assert main(["config"]) == 0
        row = next(line for line in capsys.readouterr().out.splitlines() if "host_size" in line)
        assert ("2GiB" in row, "(set by the server)" in row) == (not is_void, is_void)
        assert main(["config", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["host_size"]["value"] == (None if is_void else 2 << 30)
        assert shown["host_size"]["from"] == (
            "kvloft serve" if is_void else "environment variable KVLOFT_HOST_SIZE"
        )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["serve", "--hostsize=3", "--evict", "lru"],
            "unknown argument: --hostsize; did you mean --host-size?",
        ),
        (["serve", "--evict", "lru"], "unknown argument: --evict; did you mean --eviction?"),
        (["status", "extra"], "unknown argument: extra\n"),
        (["bench", "copy", "--nothing"], "unknown argument: --nothing\n"),
    ],
)
def test_unknown_options_are_reported_with_the_known_ones(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Abbreviations are rejected, because an abbreviation could select an option that the user did
    not mean.
    """
    with pytest.raises(SystemExit) as ended:
        main(argv)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and said in err and err.startswith(f"usage: kvloft {argv[0]}")
