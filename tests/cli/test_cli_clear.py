"""Tests `kvloft clear` with a real server: the confirmation and the selection of a namespace."""

import json
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest
from watched import stats_of

from kvloft import _core
from kvloft.cli.__main__ import main


def test_clear_empties_a_server_only_after_confirmation(
    socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["clear", "--socket", socket]) == 1
    assert "use --yes" in capsys.readouterr().err
    assert stats_of(socket)["frames_visible"] == 3
    assert main(["clear", "--socket", socket, "--yes"]) == 0
    assert capsys.readouterr().out == "3 chunks removed\n"
    stats = stats_of(socket)
    assert (stats["frames_visible"], stats["disk_used"], stats["cleared"]) == (0, 0, 3)
    for more in ([], ["--yes"]):
        assert main(["clear", "--socket", f"{socket}.none", *more]) == 1
        assert "cannot connect to a kvloft server" in capsys.readouterr().err


def test_clear_empties_a_namespace_that_is_on_disk_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a restart, no engine has opened the namespace yet. The command reports ambiguous
    names.
    """

    def chunks() -> list[int]:
        assert main(["inspect", str(tmp_path / "disk"), "--json"]) == 0
        return sorted(space["chunks"] for space in json.loads(capsys.readouterr().out))

    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        path = f"{folder}/run/kv.sock"

        def serve() -> _core.Server:
            return _core.Server(
                path, host_bytes=1 << 20, disk_path=str(tmp_path / "disk"), disk_bytes=1 << 20
            )

        with closing(serve()):
            for nth in (1, 2):
                engine = _core.Session.connect(
                    path, frame_bytes=4096, namespace=bytes([nth] * 32), timeout_s=60.0
                )
                chain = _core.KeyChain(
                    _core.root_key(bytes([nth] * 32), None, None), block_tokens=1
                )
                chain.append_tokens([1, 2, 3])
                (saved,), _ = engine.reserve([(chain, (), 0, 0, 3, [[1, 2, 3]])])
                assert saved is not None
                engine.settle(saved.tickets())
                assert engine.flush(60.0)
                engine.close()
        with closing(serve()):
            assert chunks() == [3, 3]
            while _core.server_status(path)["stats"]["server_disk_unused"]:
                time.sleep(0.01)  # a busy server may listen before it claims its disk
            assert main(["clear", "--socket", path, "--yes"]) == 2
            said = capsys.readouterr().err
            assert (
                "open or closed namespaces match; use --namespace with one of: 0101010101010101, "
                "0202020202020202" in said
            )
            assert main(["clear", "--socket", path, "--yes", "--namespace", "03"]) == 2
            assert "no namespace id starts with 03; " in capsys.readouterr().err
            assert main(["clear", "--socket", path, "--yes", "--namespace", "01" * 32]) == 0
            assert capsys.readouterr().out == "3 chunks removed\n"
            assert chunks() == [0, 3]
            engine = _core.Session.connect(
                path, frame_bytes=4096, namespace=bytes([2] * 32), timeout_s=60.0
            )
            assert main(["clear", "--socket", path, "--yes", "--namespace", "02"]) == 0
            assert capsys.readouterr().out == "3 chunks removed\n"
            engine.close()


def test_clear_asks_for_confirmation_only_if_a_server_answers(
    socket: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda text: (asked.append(text), "yes")[1])
    assert main(["clear", "--socket", f"{socket}.none"]) == 1
    assert "cannot connect to a kvloft server" in capsys.readouterr().err
    assert asked == []
    assert main(["clear", "--socket", socket]) == 0
    assert capsys.readouterr().out == "3 chunks removed\n"
    assert len(asked) == 1


def test_clear_is_not_agreed_to_by_the_end_of_input(
    socket: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", ends)
    assert main(["clear", "--socket", socket]) == 1
    assert "nothing was removed" in capsys.readouterr().err
