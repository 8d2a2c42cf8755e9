"""`kvloft config`: what a person and a script read, and how mistakes end."""

import json

import pytest

from kvloft.cli.__main__ import main
from kvloft.config import KEYS


def test_table_names_every_key_with_value_and_origin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLOFT_HOST_SIZE", "2GiB")
    assert main(["config"]) == 0
    out = capsys.readouterr().out
    assert all(key in out for key in KEYS)
    row = next(line for line in out.splitlines() if "host_size" in line)
    assert "2GiB" in row
    assert "KVLOFT_HOST_SIZE" in row


def test_json_is_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--json", "--extra", '{"disk_path": "/cache", "disk_size": "1GiB"}']) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == list(KEYS)
    assert shown["disk_size"] == {"value": 1 << 30, "from": "kv_connector_extra_config"}
    assert shown["eviction"] == {"value": "lru", "from": "default"}


@pytest.mark.parametrize("extra", ["{", "[]", '{"host_size": "many"}', '{"hostsize": 1}'])
def test_a_mistake_is_one_line_on_stderr_and_status_2(capsys: pytest.CaptureFixture[str], extra: str) -> None:
    assert main(["config", "--extra", extra]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvloft: ")
    assert captured.err.count("\n") == 1


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2
    assert "usage: kvloft" in capsys.readouterr().err
