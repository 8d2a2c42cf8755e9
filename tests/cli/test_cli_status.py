"""Tests `kvloft status`: the summary for operators and the same figures for scripts."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from watched import save, stats_of

from kvloft import _core
from kvloft.cli import connection, watch
from kvloft.cli import status as status_command
from kvloft.cli.__main__ import main
from kvloft.config.units import size_text


def shown_first(status: dict[str, Any]) -> list[str]:
    """Return the part of the status above the namespaces."""
    console = Console(width=200, record=True, file=io.StringIO())
    status_command._print(status, "/kv.sock", console)
    return console.export_text().split("\n\n")[0].splitlines()


def looked_at(socket: str, **stats: int) -> dict[str, Any]:
    """Return the status of the server with some numbers changed."""
    status = _core.server_status(socket)
    return status | {"stats": status["stats"] | stats, "settings": {"disk_path": "/a/disk"}}


def test_a_person_reads_first_whether_a_server_is_well_and_how_full(socket: str) -> None:
    status = looked_at(socket, server_disk_bytes=1 << 30, server_disk_free_bytes=5 << 30)
    (space,) = status["namespaces"]
    space["stats"] |= {"disk_bytes": 1 << 28, "lookup_chunks": 8, "lookup_chunks_found": 6}
    assert shown_first(status) == [
        "The kvloft server at unix:/kv.sock is healthy.",
        "host memory: 12 KiB of 1 MiB (1.2%) used",
        "disk: 256 MiB of 1 GiB (25.0%) in files; its file system has 5 GiB free",
        "disk path: /a/disk",
        "engines: 1 connected, in 1 namespace",
        "hit rate: 75.0% of 8 chunks looked up",
    ]
    status["stats"]["server_disk_closed_bytes"] = 1 << 28
    assert "512 MiB of 1 GiB (50.0%) in files" in shown_first(status)[2], (
        "includes namespaces that are not open"
    )
    del status["stats"]["server_disk_free_bytes"]
    assert shown_first(status)[2].endswith("(50.0%) in files"), "before the first measurement"
    assert (
        shown_first(status | {"stats": status["stats"] | {"server_disk_bytes": 0}})[2]
        == "disk: none"
    )


@pytest.mark.parametrize(
    ("free", "left", "is_full"),
    [
        (0, 1, True),
        (64 << 20, 1 << 30, False),
        ((64 << 20) - 1, 1 << 30, True),
        (4096, 8192, True),
        (8192, 8192, False),
        (0, 0, False),
    ],
)
def test_a_file_system_too_small_for_disk_size_is_reported(
    free: int, left: int, is_full: bool, socket: str
) -> None:
    taken = stats_of(socket)["disk_bytes"]
    status = looked_at(
        socket,
        server_disk_bytes=taken + left,
        server_disk_free_bytes=free,
        server_disk_closed_bytes=0,
    )
    said = "The file system holding /a/disk is full"
    told = [line for line in shown_first(status) if line.startswith(said)]
    assert len(told) == is_full
    assert shown_first(status)[0].endswith(" has 1 problem:" if is_full else " is healthy.")
    drawn = Console(width=200, record=True, file=io.StringIO())
    drawn.print(watch.picture(status, {}))
    assert (said in drawn.export_text()) == is_full


def test_a_failing_disk_is_reported_once(socket: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = looked_at(socket)
    (space,) = status["namespaces"]
    space["stats"]["disk_broken"] = 1
    said = [
        "The kvloft server at unix:/kv.sock has 1 problem:",
        "The disk tier is paused because I/O is failing; retrying.",
    ]
    assert shown_first(status)[:2] == said
    status["stats"]["server_disk_unused"] = 1
    status["disk_trouble"] = "disk_path /a/disk is not used: /a does not exist"
    assert shown_first(status)[:2] == [
        said[0],
        "The disk /a/disk is not in use: /a does not exist.",
    ]


@pytest.mark.parametrize(
    "more",
    [
        {"server_disk_unused": 1},
        {"server_disk_free_bytes": 0, "server_disk_bytes": 1 << 30},
        {"disk_broken": 1},
        {},
    ],
)
def test_a_disk_is_called_slow_only_if_it_works(more: dict[str, int], socket: str) -> None:
    status = looked_at(socket, **more)
    (space,) = status["namespaces"]
    space["stats"] |= {"disk_dropped": 130, "disk_unwritten": 124} | more
    for draw in (
        lambda console: status_command._print(status, "/kv.sock", console),
        lambda console: console.print(watch.picture(status, {})),
    ):
        console = Console(width=200, record=True, file=io.StringIO())
        draw(console)
        slow = "; 124 were evicted first because disk writes cannot keep up with saves"
        lines = console.export_text().splitlines()
        assert f"130 chunks never written to disk{'' if more else slow}" in [
            line.rstrip() for line in lines
        ]


def test_rejected_engines_are_a_problem_with_count_and_reason(socket: str) -> None:
    status = looked_at(socket)
    assert status["refusals"] == []
    status["refusals"] = [{"namespace": "3f9a", "count": 14, "reason": "--host-size is too large"}]
    assert shown_first(status)[:2] == [
        "The kvloft server at unix:/kv.sock has 1 problem:",
        (
            "The server rejected 14 connections from engines in namespace 3f9a: --host-size is too "
            "large. These engines keep retrying."
        ),
    ]


def test_the_size_of_compressed_chunks_is_shown_uncompressed(socket: str) -> None:
    status = looked_at(socket)
    (space,) = status["namespaces"]
    space["stats"] |= {"host_used_bytes": 36 << 30, "host_raw_bytes": 50 << 30}
    (line,) = [line for line in shown_first(status) if line.startswith("host memory:")]
    assert line.endswith(" used; 50 GiB uncompressed (1.39x)")
    space["stats"]["host_raw_bytes"] = 36 << 30
    (line,) = [line for line in shown_first(status) if line.startswith("host memory:")]
    assert line.endswith(" used")


def test_a_config_file_for_engines_with_a_disk_path_of_their_own_names_the_server(
    socket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "kvloft.yaml"
    settings.write_text(f"server: unix:{socket}\ndisk_size: 8GiB\n")
    monkeypatch.setenv("KVLOFT_CONFIG", str(settings))
    assert main(["status"]) == 0


def test_json_has_the_summary_first_and_all_fields(
    socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["status", "--json"], ["status", "--watch", "--json", "--count", "1"]):
        assert main([command[0], "--socket", socket, *command[1:]]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert {"host_bytes", "slab_bytes", "stats", "settings", "namespaces"} <= shown.keys()
        sizes = [
            shown[name]
            for name in ("host_used_bytes", "host_size_bytes", "disk_size_bytes", "engines")
        ]
        assert (sizes, shown["problems"], shown["disk_path"]) == (
            [3 * 4096, 1 << 20, 1 << 20, 1],
            [],
            None,
        )
        assert shown["disk_files_bytes"] == stats_of(socket)["disk_bytes"] > 0
        assert shown["disk_free_bytes"] == shown["stats"]["server_disk_free_bytes"] > 0
        assert shown["hit_rate"] is None


def test_commands_accept_the_name_in_status(
    socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = _core.Session.connect(socket, frame_bytes=4096, namespace=b"\x1a" * 32, timeout_s=60.0)
    save(other, [7, 8])
    assert main(["status", "--verbose", "--socket", socket]) == 0
    shown = capsys.readouterr().out
    names = re.findall(r"^namespace ([0-9a-f]+): ", shown, re.MULTILINE)
    assert names == ["00" * 8, "1a" * 8]
    wholes = re.findall(r"^full id: ([0-9a-f]{64})$", shown, re.MULTILINE)
    assert wholes == ["00" * 32, "1a" * 32]
    assert shown.index(wholes[0]) > shown.rindex("engine  "), (
        "must come after everything that changes"
    )
    for name in (names[1], wholes[1]):
        assert main(["evict", "--socket", socket, "--namespace", name, "--host-only"]) == 0
        assert main(["clear", "--socket", socket, "--namespace", name, "--yes"]) == 0
    assert [
        space["stats"]["frames_visible"] for space in _core.server_status(socket)["namespaces"]
    ] == [3, 0]
    other.close()


def test_percentages_are_of_the_whole_tier(socket: str) -> None:
    status = looked_at(socket)
    (space,) = status["namespaces"]
    assert space["slabs"] * status["slab_bytes"] < status["host_bytes"], (
        "otherwise both figures would be equal"
    )
    drawn = Console(width=150, record=True, file=io.StringIO())
    drawn.print(watch.picture(status, {}))
    text = drawn.export_text()
    (host,) = [line.split() for line in text.splitlines() if line.startswith("host ")]
    assert host[:5] == ["host", "3", "12", "KiB", "1.2%"]
    assert "full" not in text and "of size" in text
    taken = size_text(space["slabs"] * status["slab_bytes"])
    assert f"assigned {taken} of 1 MiB host memory" in text


def test_the_only_usual_socket_is_found(
    socket: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connection, "SERVICE_SOCKET", socket)
    monkeypatch.setattr(connection, "auto_socket", lambda: "/nowhere/auto.sock")
    assert main(["status"]) == 0
    assert f"unix:{socket}" in capsys.readouterr().out
    monkeypatch.setattr(connection, "auto_socket", lambda: socket)
    assert main(["status"]) == 2
    assert "found multiple server sockets (" in (said := capsys.readouterr().err)
    assert "use --socket PATH" in said


def test_a_search_without_a_server_fails_like_a_socket_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connection, "SERVICE_SOCKET", "/nowhere/kvloft.sock")
    monkeypatch.setattr(connection, "auto_socket", lambda: "/nowhere/auto.sock")
    assert main(["status"]) == 1
    assert capsys.readouterr().err == (
        "kvloft: no server found at /nowhere/kvloft.sock or /nowhere/auto.sock; use --socket "
        "PATH, or set KVLOFT_SERVER=unix:PATH; start one with `kvloft serve`\n"
    )


def test_a_socket_below_a_hidden_directory_is_reported_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The superuser, who runs this test, can search every directory."""

    def is_dir(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", is_dir)
    hidden = tmp_path / "run" / "kvloft.sock"
    assert connection._is_hidden(hidden)
    assert main(["status", "--socket", str(hidden)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_other_settings_do_not_matter_to_a_command_on_a_server(
    socket: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVLOFT_HOST_SIZE", "huge")
    assert main(["status", "--socket", socket]) == 0
    monkeypatch.setenv("KVLOFT_SERVER", socket)
    assert main(["status"]) == 0
