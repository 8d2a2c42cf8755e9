"""Tests the warnings about settings that are logged before the model is known.

The checks must not create or change anything.
"""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvloft.config.sources import load_config
from kvloft.errors import ConfigError
from kvloft.machine import refuse_here, refuse_impossible, refuse_nodes, warnings


def said(**extra: object) -> list[str]:
    return warnings(load_config({key: str(value) for key, value in extra.items()}, {}))


def test_valid_settings_warn_of_nothing_and_create_nothing(tmp_path: Path) -> None:
    assert said(host_size="1MiB", disk_path=tmp_path / "new", disk_size="1MiB") == []
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("size", "is_odd"),
    [(32000, True), ("4096", True), ("0.5e6", None), ("32000B", False), ("8KiB", False)],
)
@pytest.mark.parametrize("server", [None, "auto"])
def test_a_small_size_without_a_unit_warns(
    size: object, is_odd: bool | None, server: str | None
) -> None:
    if is_odd is None:
        with pytest.raises(ConfigError):
            load_config({"host_size": size}, {})
        return
    found = warnings(load_config({"host_size": size, "server": server}, {}))
    assert [text.split("; ")[1] for text in found] == (
        [f"did you mean {size}MiB?"] if is_odd else []
    )


@pytest.mark.parametrize(
    ("quota", "meant"),
    [
        (10, "10%"),
        ("10", "10%"),
        (100, "100%"),
        (500, "500MiB"),
        ("10%", None),
        (0.1, None),
        ("4KiB", None),
    ],
)
def test_a_small_quota_without_a_unit_warns(quota: object, meant: str | None) -> None:
    found = warnings(load_config({"salt_quota": quota}, {}))
    assert [text.split("; ")[1] for text in found] == ([f"did you mean {meant}?"] if meant else [])


def test_a_quota_of_zero_frames_warns_unless_individual_salts_have_quotas(tmp_path: Path) -> None:
    for quota, shown in (("0", "0B"), ("0%", "0%"), ("0.0", "0%")):
        (text,) = said(salt_quota=quota)
        assert text.startswith(
            f"salt_quota = {shown} (kv_connector_extra_config) prevents all saves for requests "
            "with a cache_salt"
        )
    file = tmp_path / "limits.yaml"
    file.write_text("- {salt: a, quota: 10%}\n- {salt: b, quota: 0}\n")
    assert said(salt_quota="0", salt_limits=file) == [], "only the salts in the file have limits"
    assert said(salt_disk_quota="0", disk_path=tmp_path / "new", disk_size="1MiB") == [], (
        "the limit applies only to host memory"
    )


def test_a_quota_of_the_disk_in_the_file_needs_a_disk(tmp_path: Path) -> None:
    file = tmp_path / "limits.yaml"
    file.write_text(
        "- {salt: a, disk_quota: 10%}\n- {salt: b, disk_quota: 9GiB, quota: 1%}\n- {salt: c, "
        "disk_quota: null}\n"
    )
    assert said(salt_limits=file) == [
        f"salt_limits = {file}, entry 1: disk_quota = 10% has no effect without disk_path.",
        f"salt_limits = {file}, entry 2: disk_quota = 9GiB has no effect without disk_path.",
    ]
    assert said(salt_limits=file, disk_path=tmp_path / "new", disk_size="9GiB") == []


@pytest.mark.parametrize(
    ("ttl", "meant"), [(24, "24h"), ("7", "7h"), (3600, None), ("24h", None), ("30s", None)]
)
@pytest.mark.parametrize("server", [None, "auto"])
def test_a_short_ttl_without_a_unit_warns(
    ttl: object, meant: str | None, server: str | None
) -> None:
    found = warnings(load_config({"salt_ttl": ttl, "server": server}, {}))
    assert found == (
        [
            (
                f"salt_ttl = {ttl} (kv_connector_extra_config) has no unit, so it is read as "
                f"seconds; did you mean {meant}?"
            )
        ]
        if meant
        else []
    )


@pytest.mark.parametrize("server", ["/a.sock", "auto", None])
@pytest.mark.parametrize(
    ("timeout", "is_odd"), [(5, True), ("5", True), (0.005, False), ("5ms", False)]
)
def test_a_long_server_timeout_without_a_unit_warns(
    timeout: object, is_odd: bool, server: str | None
) -> None:
    said = (
        "server_timeout = 5 (kv_connector_extra_config) has no unit, so it is read as seconds; did "
        "you mean 5ms?"
    )
    found = warnings(load_config({"server_timeout": timeout, "server": server}, {}))
    assert found == ([said] if is_odd else [])


def test_a_quota_of_more_than_there_is_limits_nothing(tmp_path: Path) -> None:
    sizes: dict[str, object] = {"host_size": "4MiB", "disk_path": tmp_path, "disk_size": "8MiB"}
    assert said(**sizes, salt_quota="4MiB", salt_disk_quota="8MiB") == []
    for part in ("100%", 1.0, "1.0"):
        host, disk = said(**sizes, salt_quota=part, salt_disk_quota=part)
        assert host == (
            "salt_quota = 100% (kv_connector_extra_config) covers all of the namespace's host "
            "memory, so it has no effect; remove the setting."
        )
        assert disk.startswith(
            "salt_disk_quota = 100% (kv_connector_extra_config) covers all of disk_size, so it has "
            "no effect;"
        )
    assert said(**sizes, salt_quota="99.9%", salt_disk_quota="0.999") == []
    file = tmp_path / "limits.yaml"
    file.write_text("- {salt: a, quota: 100%}\n")
    sizes["disk_path"] = tmp_path / "new"
    assert said(**sizes, salt_quota="10%", salt_limits=file) == [], (
        "the file removes the common limit for one salt"
    )
    host, disk = said(**sizes, salt_quota="5MiB", salt_disk_quota="9MiB")
    source = "(kv_connector_extra_config)"
    assert host == (
        f"salt_quota = 5MiB {source} is more than host_size = 4MiB, so it has no effect."
    )
    assert disk == (
        f"salt_disk_quota = 9MiB {source} is more than disk_size = 8MiB, so it has no effect."
    )


def test_limits_of_individual_salts_warn_like_common_limits(tmp_path: Path) -> None:
    file = tmp_path / "{limits}.yaml"
    file.write_text(
        "- {salt: s3cret, quota: 10, disk_quota: 9MiB, ttl: 24}\n"
        "- {salt: other, quota: 5MiB, disk_quota: '4096', ttl: 24h}\n"
        "- {salt: third, quota: 0, disk_quota: 500B, ttl: 3600}\n"
        "- {salt: null, quota: null, disk_quota: 10%, ttl: 30s}\n"
    )
    sizes: dict[str, object] = {
        "host_size": "4MiB",
        "disk_path": tmp_path / "new",
        "disk_size": "8MiB",
    }
    first, second = f"salt_limits = {file}, entry 1:", f"salt_limits = {file}, entry 2:"
    assert said(**sizes, salt_limits=file) == [
        f"{first} quota = 10 has no unit, so it is read as bytes; did you mean 10%?",
        f"{first} ttl = 24 has no unit, so it is read as seconds; did you mean 24h?",
        f"{second} disk_quota = 4096 has no unit, so it is read as bytes; did you mean 4096MiB?",
        f"{first} disk_quota = 9MiB is more than disk_size = 8MiB, so it has no effect.",
        f"{second} quota = 5MiB is more than host_size = 4MiB, so it has no effect.",
    ]
    assert said(salt_limits=file, server="auto") == [], "the engine's server reads the file"
    assert warnings(load_config({"server": "/a.sock"}, {"KVLOFT_SALT_LIMITS": str(file)})) == [], (
        "the setting belongs to the server"
    )


def test_a_megabyte_without_a_unit_is_none_of_them_nor_one_that_a_stronger_source_replaced() -> (
    None
):
    assert warnings(load_config({"host_size": 1 << 20}, {})) == []
    assert warnings(load_config({"host_size": "1MiB"}, {"KVLOFT_HOST_SIZE": "32000"})) == []
    assert warnings(load_config({"server": "/a.sock"}, {"KVLOFT_HOST_SIZE": "32000"})) == [], (
        "the setting belongs to the server"
    )


def test_more_host_memory_than_there_is(tmp_path: Path) -> None:
    (text,) = said(host_size="900TiB")
    assert text.startswith("host_size = 900TiB is more than this machine's memory")


def test_disk_size_above_free_space_warns_without_counting_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text,) = said(disk_path=tmp_path, disk_size="900TiB")
    assert "disk_size = 900TiB is more than the" in text
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    assert said(disk_path=tmp_path, disk_size="2MiB")
    (tmp_path / "namespace").mkdir()
    (tmp_path / "lock").touch()
    (tmp_path / "namespace" / "frames.dat").write_bytes(bytes(1 << 20))
    assert said(disk_path=tmp_path, disk_size="2MiB") == []


def test_a_directory_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (text,) = said(disk_path="/proc/nope", disk_size="1MiB")
    assert "disk_path = /proc/nope cannot be created" in text
    monkeypatch.setattr("os.access", lambda *_: False)
    (text,) = said(disk_path=tmp_path / "x", disk_size="1MiB")
    assert text == (
        f"disk_path = {tmp_path}/x cannot be created, because {tmp_path} is not writable by this "
        f"user; run `mkdir {tmp_path}/x && chown {os.geteuid()} {tmp_path}/x` as root."
    )
    (text,) = said(disk_path=tmp_path, disk_size="1MiB")
    assert f"is not used; run `chown -R {os.geteuid()} {tmp_path}` as root." in text
    (text,) = said(disk_path=tmp_path / "mnt" / "x", disk_size="1MiB")
    assert text == (
        f"disk_path = {tmp_path}/mnt/x is not used, because {tmp_path}/mnt does not exist; mount "
        f"its file system, or run `mkdir -p {tmp_path}/mnt`."
    )


def test_an_unreadable_path_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = os.stat

    def hidden(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).startswith(f"{tmp_path}/hidden/"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    (tmp_path / "hidden").mkdir()
    monkeypatch.setattr("os.stat", hidden)
    monkeypatch.setattr("os.access", lambda *_: False)
    config = load_config({"disk_path": f"{tmp_path}/hidden/cache", "disk_size": "1MiB"}, {})
    refuse_impossible(config)
    (text,) = warnings(config)
    assert "hidden is not writable" in text


def test_a_directory_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    (text,) = said(disk_path=tmp_path, disk_size="1MiB")
    assert "files that do not belong to kvloft" in text
    (tmp_path / "lock").touch()
    assert said(disk_path=tmp_path, disk_size="1MiB") == []


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        refuse_impossible(load_config({"disk_path": str(tmp_path / "file" / "x")}, {}))


def test_a_folder_named_like_proc_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvloft.machine._nearest", lambda path: Path("/processed"))
    monkeypatch.setattr(os, "access", lambda *_: True)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 40))
    assert said(disk_path="/processed/kv", disk_size="1MiB") == []
    monkeypatch.setattr("kvloft.machine._nearest", lambda path: Path("/proc"))
    assert said(disk_path="/proc/kv", disk_size="1MiB")


def test_a_rejection_names_the_setting_and_its_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    origins = {
        "environment variable KVLOFT_HOST_SIZE": ({}, "900TiB"),
        "command line": ({"host_size": "900TiB"}, "1GiB"),
    }
    for origin, (given, variable) in origins.items():
        config = load_config(given, {"KVLOFT_HOST_SIZE": variable}, extra_origin="command line")
        with pytest.raises(
            ConfigError,
            match=rf"^host_size = 900TiB \({origin}\) is more than this machine's .*; lower it\.$",
        ):
            refuse_here(config)
    with pytest.raises(
        ConfigError, match=r"disk_path = /proc/nope \(kv_connector_extra_config\) cannot be created"
    ):
        refuse_here(load_config({"disk_path": "/proc/nope", "disk_size": "1MiB"}, {}))


def test_host_size_is_compared_with_the_memory_that_is_left() -> None:
    left = int(20.47 * (1 << 30))
    with pytest.raises(ConfigError) as error:
        refuse_here(load_config({"host_size": "23GiB"}, {}, extra_origin="command line"), left)
    assert str(error.value) == (
        "host_size = 23GiB (command line) is more than the 20.47 GiB that this machine or "
        "container has left; lower it, or free memory and retry."
    )
    refuse_here(load_config({"host_size": "20GiB"}, {}), left)
    refuse_here(load_config({"host_size": "1GiB"}, {}), None)
    refuse_here(load_config({"server": "auto", "host_size": "2MiB"}, {}), 1 << 20)
    refuse_here(load_config({"server": "/a.sock"}, {"KVLOFT_HOST_SIZE": "900TiB"}), left)


def test_an_unwritable_directory_does_not_block_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with a directory that is in use or that other users can write to, the cache uses host
    memory until the operator fixes the directory.
    """
    monkeypatch.setattr(os, "access", lambda *_: False)
    config = load_config({"disk_path": str(tmp_path / "x"), "disk_size": "1MiB"}, {})
    refuse_here(config)
    (text,) = warnings(config)
    assert "is not writable" in text
    assert warnings(config, opens_disk=True) == [], "opening the disk logs the warning once"


@pytest.mark.parametrize(
    ("lock", "is_told"), [("4711\n", True), ("", False), ("a user's own\n", False), (None, False)]
)
def test_a_disk_directory_inside_another_is_reported(
    lock: str | None, is_told: bool, tmp_path: Path
) -> None:
    disk = tmp_path / "first" / "deep" / "er"
    disk.mkdir(parents=True)
    if lock is not None:
        (tmp_path / "first" / "lock").write_text(lock)
    (tmp_path / "link").symlink_to(disk.parent)
    for path in (disk, tmp_path / "link" / "er", disk / "yet"):
        found = said(disk_path=path, disk_size="1MiB")
        assert [
            f"disk_path = {path} is inside {tmp_path}/first, which is the disk directory of another"
            in text
            for text in found
        ] == ([True] if is_told else [])
    assert said(disk_path=tmp_path / "first", disk_size="1MiB") == [] or lock is None, (
        "the engine owns the directory"
    )


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_directory_writable_by_others_is_reported(mode: int, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    disk.chmod(mode)
    config = load_config({"disk_path": str(disk), "disk_size": "1MiB"}, {})
    said = (
        f"disk_path = {disk} is writable by other users (mode {mode:o}), so it is not used; set "
        f"disk_path = {disk}/kvloft, which kvloft creates for this user only."
    )
    assert said in warnings(config)
    assert said not in warnings(config, opens_disk=True), "opening the disk logs the warning"
    disk.chmod(0o755)
    assert not any("writable" in text for text in warnings(config))


@pytest.mark.parametrize(
    ("allowed", "nodes", "wrong"),
    [
        ("0", [0], None),
        ("0", [0, 1], 1),
        ("0-3,8", [0, 3, 8], None),
        ("0-3,8", [0, 4], 4),
        ("1-2", [0], 0),
        (None, [63], None),
    ],
)
def test_nodes_that_this_process_may_not_use_are_refused(
    allowed: str | None, nodes: list[int], wrong: int | None, tmp_path: Path
) -> None:
    status = tmp_path / "status"
    if allowed is not None:
        status.write_text(
            f"Name:\tpython\nMems_allowed:\t00000001\nMems_allowed_list:\t{allowed}\n"
        )
    if wrong is None:
        refuse_nodes(nodes, status)
    else:
        with pytest.raises(
            ConfigError, match=rf"NUMA node {wrong} does not exist.* allowed nodes: {allowed} "
        ):
            refuse_nodes(nodes, status)
