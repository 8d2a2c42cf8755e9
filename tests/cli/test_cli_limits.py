"""Tests `kvloft serve` with tenant limits: the settings reach the store, the output shows tags, and
no salt is shown.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloft import _core
from kvloft.cli.__main__ import main
from kvloft.cli.admin import limits_text
from kvloft.cli.tables import tenant_table, whose
from kvloft.config.table import KEYS

FRAME = 4096
SALT, OTHER = "acme's secret", "another"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:  # a socket path must be short
        yield Path(folder)


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Start a server with 1 MiB of host memory (256 frames).

    A limit of 10% is 25 frames. The named tenant's quota is 5 frames, in memory and on disk.
    """
    socket = str(folder / "run" / "kv.sock")
    (folder / "run").mkdir(mode=0o700)
    (folder / "acme.salt").write_text(SALT + "\n")
    (folder / "limits.yaml").write_text(
        "- {salt_file: acme.salt, quota: 20KiB, disk_quota: 20KiB, ttl: 7d}\n- {salt: null, ttl: "
        "30d}\n"
    )
    sizes = ["--host-size", "1MiB", "--disk-path", str(folder / "disk"), "--disk-size", "4MiB"]
    limits = [
        "--salt-quota",
        "10%",
        "--salt-ttl",
        "24h",
        "--salt-limits",
        str(folder / "limits.yaml"),
        "--share",
        "0101=100",
    ]
    argv = [sys.executable, "-m", "kvloft.cli", "serve", "--socket", socket, *sizes, *limits]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().endswith(f"/disk up to 4 MiB; {bounds(folder)}\n")
            yield socket, process
        finally:
            process.kill()


def bounds(folder: Path) -> str:
    return (
        "each salt: at most 10% of its namespace's host memory, expires after 1d; "
        f"other limits for individual salts: {folder / 'limits.yaml'}; "
        "fixed shares of host memory: 0101 100%"
    )


def save(engine: _core.Session, salt: str | None, seed: int, num_blocks: int) -> int:
    chain = _core.KeyChain(_core.root_key(bytes([1] * 32), None, salt), block_tokens=1)
    chain.append_tokens(list(range(100 * seed, 100 * seed + num_blocks)))
    (chunks,), _ = engine.reserve([(chain, (), 0, 0, num_blocks, [list(range(1, num_blocks + 1))])])
    assert chunks is not None
    return engine.settle(chunks.tickets())[0]


def test_status_shows_usage_of_tenants_without_salts(
    server: tuple[str, "subprocess.Popen[str]"], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    socket, process = server
    engine = _core.Session.connect(
        socket, frame_bytes=FRAME, namespace=bytes([1] * 32), timeout_s=60.0
    )
    assert [save(engine, salt, 0, 30) for salt in (SALT, OTHER, None)] == [5, 25, 30]
    assert engine.flush(60.0)
    (space,) = _core.server_status(socket)["namespaces"]
    limits = ("max_host_bytes", "max_disk_bytes", "ttl_s")
    rows = {tuple(row[name] for name in limits): row for row in space["tenants"]}
    held = {key: (row["host_bytes"], row["disk_bytes"]) for key, row in rows.items()}
    assert held == {
        (5 * FRAME, 5 * FRAME, 7 * 86400): (5 * FRAME, 5 * FRAME),
        (25 * FRAME, None, 86400): (25 * FRAME, 25 * FRAME),
        (None, None, 30 * 86400): (30 * FRAME, 30 * FRAME),
    }
    assert space["stats"]["quota_dropped"] == 30, "25 frames of one tenant and 5 of the other"
    shown = []
    for command in (
        ["status"],
        ["status", "--json"],
        ["status", "--watch", "--count", "1"],
        ["status", "--watch", "--count", "1", "--json"],
    ):
        assert main([command[0], "--socket", socket, *command[1:]]) == 0
        shown.append(capsys.readouterr().out)
    tag = rows[5 * FRAME, 5 * FRAME, 7 * 86400]["tag"]
    lines = [line.split() for line in shown[0].splitlines()]
    assert [tag, "20", "KiB", "20", "KiB", "20", "KiB", "20", "KiB", "7d"] in lines
    assert ["(no", "salt)", "120", "KiB", "120", "KiB", "30d"] in lines
    assert all(len(line) <= 80 for line in shown[0].splitlines() if tag in line)
    assert all(tag in text for text in shown)
    settings = json.loads(shown[1])["settings"]
    limits = ("salt_quota", "salt_disk_quota", "salt_ttl", "share", "numa")
    assert [settings[name] for name in limits] == ["10%", "(none)", "1d", "0101 100%", "(none)"]
    whole = f"Limits: {bounds(folder)}"
    assert shown[0].splitlines()[6] == whole
    first = shown[2].splitlines()[0]
    assert first.endswith("…") and whole.startswith(first[:-1]) and 70 < len(first) <= 80, (
        "the summary is short; `status` shows everything"
    )
    for salt, its_tag, said in (
        (SALT, tag, "marked * below"),
        ("none's", None, "the tenant has no chunks in open namespaces"),
    ):
        assert main(["status", "--socket", socket, "--salt", salt]) == 0
        shown.append(capsys.readouterr().out)
        line = next(
            line for line in shown[-1].splitlines() if line.startswith("The salt's tag is ")
        )
        assert said in line
        assert its_tag is None or its_tag in line
        assert [row.split()[0] for row in shown[-1].splitlines() if " * " in row[:20]] == (
            [its_tag] if its_tag else []
        )
        assert all(
            len(row) <= 80
            for row in shown[-1].splitlines()
            if not row.startswith(("Limits", "The kvloft", "disk path"))
        )
    assert main(["status", "--watch", "--count", "1", "--socket", socket, "--salt", SALT]) == 0
    shown.append(capsys.readouterr().out)
    assert f"{tag} *" in shown[-1]
    assert (
        main(["status", "--socket", socket, "--salt-file", str(folder / "acme.salt"), "--json"])
        == 0
    )
    shown.append(capsys.readouterr().out)
    assert json.loads(shown[-1])["salt_tag"] == tag
    process.terminate()
    said = process.communicate(timeout=60)[0]
    assert not [text for text in (*shown, said) if SALT in text or OTHER in text]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--salt-quota", "110%"],
            (
                'salt_quota = "110%" (command line) is not allowed; '
                'it must be a percentage such as "10%"'
            ),
        ),
        (
            ["--salt-quota", "null"],
            'it must be a percentage such as "10%", or a size such as "8GiB".\n',
        ),
        (
            ["--salt-ttl", "0s"],
            'salt_ttl = "0s" (command line) is not allowed; it must be a time from 1s to 3650d',
        ),
        (["--salt-disk-quota", "1%"], "has no effect without disk_path"),
        (["--salt-limits", "/none/such.yaml"], "salt_limits = /none/such.yaml cannot be read"),
    ],
)
def test_wrong_limits_are_one_sentence(
    options: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["serve", "--socket", str(folder / "kv.sock"), "--host-size", "1MiB", *options]) == 2
    )
    assert said in capsys.readouterr().err


def tenant(tag: str | None, ttl_s: int | None = None) -> dict[str, object]:
    limits = {"max_host_bytes": None, "max_disk_bytes": None, "ttl_s": ttl_s}
    return {"tag": tag, "host_bytes": FRAME, "disk_bytes": 0, **limits}


@pytest.mark.parametrize(
    ("num_salts", "said"), [(1, []), (2, ["and 1 smaller tenant"]), (3, ["and 2 smaller tenants"])]
)
def test_salts_that_are_left_out_are_counted(num_salts: int, said: list[str]) -> None:
    space = {"tenants": [tenant("ab")], "stats": {"salts": num_salts}}
    assert tenant_table(space, 8)[1:] == said


@pytest.mark.parametrize(
    ("num_salts", "said"),
    [
        (1, "the tenant has no chunks in open namespaces"),
        (2, "the tenant is not among the largest"),
    ],
)
def test_a_salt_that_is_not_listed_may_have_something(num_salts: int, said: str) -> None:
    spaces: list[dict[str, object]] = [
        {"tenants": [tenant("ab"), tenant(None)], "stats": {"salts": num_salts}}
    ]
    assert whose("cd", spaces) == f"The salt's tag is cd; {said}."


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ""),
        ({"salt_quota": "(none)", "numa": "(none)", "disk_size": "1GiB"}, ""),
        ({"salt_quota": KEYS["salt_quota"].show(10)}, "each salt: at most 10B of host memory"),
        (
            {"salt_quota": "1GiB", "salt_disk_quota": "5%"},
            "each salt: at most 1GiB of host memory, at most 5% of the disk",
        ),
        (
            {"salt_limits": "/a.yaml", "numa": "0,1"},
            "limits for individual salts: /a.yaml; host memory on NUMA nodes 0,1",
        ),
        (
            {"share": "3f9a 25%, 77 5%", "numa": "0"},
            "fixed shares of host memory: 3f9a 25%, 77 5%; host memory on NUMA node 0",
        ),
    ],
)
def test_bounds_are_reported_in_words(settings: dict[str, str], said: str) -> None:
    assert limits_text(settings) == said


def test_requests_without_a_salt_have_a_row_only_with_a_limit() -> None:
    for ttl_s, is_shown in ((None, False), (10, True)):
        space = {"tenants": [tenant(None, ttl_s)], "stats": {"salts": 0}}
        assert bool(tenant_table(space, 8)) is is_shown
