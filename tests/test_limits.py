"""Tests how tenant limits are derived from the settings and from the file with limits per salt.

Also checks that no error message reveals a salt.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloft.config.sources import load_config
from kvloft.config.table import Config
from kvloft.config.units import MAX_TTL_S, format_quota, format_ttl, parse_quota, parse_ttl
from kvloft.errors import ConfigError
from kvloft.limits import Limits, TenantLimits, tenant_limits
from kvloft.machine import refuse_impossible

SECRET = "acme-s3cr3t"


def limits_of(path: Path, text: str, **more: object) -> TenantLimits | None:
    path.write_text(text)
    return tenant_limits(load_config({"salt_limits": str(path), **more}, {}))


@given(st.integers(0, 1 << 60) | st.integers(0, 1_000_000).map(lambda millionths: millionths / 1e6))
def test_quotas_are_read_back(quota: int | float) -> None:
    read = parse_quota(format_quota(quota))
    assert (read, type(read)) == (quota, type(quota))


@given(st.floats(1e-6, 1.0))
def test_a_percentage_is_passed_to_a_server_unchanged(part: float) -> None:
    """With `server: auto`, an engine passes all of its settings to the server."""
    quota = parse_quota(part)
    assert parse_quota(format_quota(quota)) == quota and abs(quota - part) < 1e-6


@given(st.integers(1, MAX_TTL_S))
def test_times_are_read_back(seconds: int) -> None:
    assert parse_ttl(format_ttl(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("10%", 0.1),
        (" 0.05 % ", 0.0005),
        ("100%", 1.0),
        ("0%", 0.0),
        ("8GiB", 8 << 30),
        (0, 0),
        ("0", 0),
        (4096, 4096),
        (0.5, 0.5),
    ],
)
def test_a_quota_is_a_part_or_a_size(text: object, quota: float) -> None:
    assert parse_quota(text) == quota


@pytest.mark.parametrize(
    "wrong",
    [
        "101%",
        "-1%",
        "%",
        "1e1%",
        "10 percent",
        "0.00001%",
        -1,
        1.5,
        -0.1,
        1e-7,
        True,
        None,
        "",
        "1.5",
        [],
        float("nan"),
    ],
)
def test_other_quotas_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError):
        parse_quota(wrong)


@pytest.mark.parametrize(
    ("text", "quota"),
    [("0.5", 0.5), (" 1.0 ", 1.0), ("0.0", 0.0), ("01.0", 1.0), ("1", 1), ("2.0", 2), (2.0, 2)],
)
def test_a_number_with_a_point_is_a_part_up_to_one_as_text_too(text: object, quota: float) -> None:
    assert (parse_quota(text), type(parse_quota(text))) == (quota, type(quota))


@pytest.mark.parametrize("wrong", ["1.0000001", "0.0000001", ".5", "1."])
def test_texts_that_are_no_part_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError):
        parse_quota(wrong)


@pytest.mark.parametrize(
    "wrong", ["0s", 0, "0", 1.5, "1.5s", "1y", "3651d", "-1h", None, True, "", "1e3s", "1ms"]
)
def test_other_times_are_refused(wrong: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        parse_ttl(wrong)


def test_without_a_setting_nothing_is_limited() -> None:
    assert tenant_limits(Config()) is None


def test_individual_limits_override_common_limits(tmp_path: Path) -> None:
    (tmp_path / "b.salt").write_text("b\n")
    text = f"""
- {{salt: {SECRET}, quota: 25%, ttl: 7d}}
- {{salt_file: b.salt, quota: null, disk_quota: 1GiB}}
- {{salt: null, ttl: 30d}}
"""
    all_of = {
        "salt_quota": "10%",
        "salt_disk_quota": "20%",
        "salt_ttl": "24h",
        "disk_path": "/cache",
    }
    limits = limits_of(tmp_path / "limits.yaml", text, **all_of)
    assert limits == TenantLimits(
        salted=Limits(0.1, 0.2, 86400),
        unsalted=Limits(None, None, 30 * 86400),
        by_salt=((SECRET, Limits(0.25, 0.2, 7 * 86400)), ("b", Limits(None, 1 << 30, 86400))),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("salt: x", "is not a list"),
        (f"- {SECRET}: [", "is not valid YAML"),
        (f"- {SECRET}", "entry 1: expected either salt or salt_file"),
        ("- {quota: 1%}", "entry 1: expected either salt or salt_file"),
        (f"- {{salt: {SECRET}, salt_file: x}}", "entry 1: expected either salt or salt_file"),
        (f"- {{salt: {SECRET}, qouta: 1%}}", "entry 1: 'qouta' is not a known key"),
        (f"- {{salt: {SECRET}, salt: x, quota: 1%}}", "entry 1 sets salt twice"),
        (
            f"- {{salt: null}}\n- {{salt: {SECRET}, quota: 1%, quota: 2%}}",
            "entry 2 sets quota twice",
        ),
        (f"- {{{SECRET}: 1, {SECRET}: 2}}", "entry 1: expected either salt or salt_file"),
        (
            f"- {{salt: {SECRET}, quota: {SECRET}}}",
            "entry 1: quota is not allowed; it must be a percentage",
        ),
        (f"- {{salt: {SECRET}, ttl: 5y}}", "entry 1: ttl is not allowed; it must be a time"),
        (
            f"- {{salt: {SECRET}}}\n- {{salt: {SECRET}}}",
            "entry 2: an earlier entry has the same salt",
        ),
        ("- {salt: null}\n- {salt: null}", "entry 2: an earlier entry has the same salt"),
        ("- {salt: 5}", "entry 1: salt must be non-empty text"),
        ('- {salt: ""}', "entry 1: salt must be non-empty text"),
        ("- {salt_file: missing}", "/missing cannot be read (No such file or directory)"),
        ('- {salt_file: "a\\0b"}', "not a valid path"),
        ("- {salt_file: empty}", "the salt is empty"),
        (
            "- {salt_file: large}",
            "salt_file large is larger than 64 KiB; it must contain a single salt",
        ),
        ("- {salt_file: [1]}", "salt_file must be a file path"),
    ],
)
def test_a_wrong_file_is_named_without_a_salt(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "large").write_text(SECRET.ljust((1 << 16) + 1, "x"))
    with pytest.raises(ConfigError) as error:
        limits_of(tmp_path / "limits.yaml", text)
    assert said in str(error.value)
    assert str(error.value).startswith(f"salt_limits = {tmp_path / 'limits.yaml'}")
    assert SECRET not in str(error.value)


def test_a_salt_file_of_64_kib_is_one_salt(tmp_path: Path) -> None:
    (tmp_path / "large").write_text("x" * (1 << 16))
    limits = limits_of(tmp_path / "limits.yaml", "- {salt_file: large, quota: 1%}")
    assert limits is not None
    assert [len(salt) for salt, _ in limits.by_salt] == [1 << 16]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        tenant_limits(Config(salt_limits=str(tmp_path / "none.yaml")))


def test_an_engine_of_a_server_does_not_read_the_servers_salts() -> None:
    environ = {"KVLOFT_SALT_LIMITS": "/none/such.yaml"}
    refuse_impossible(load_config({"server": "unix:/s"}, environ))
    for own in ({}, {"server": "auto"}):
        with pytest.raises(ConfigError, match="cannot be read"):
            refuse_impossible(load_config(own, environ))


def test_a_quota_of_the_disk_needs_one() -> None:
    with pytest.raises(
        ConfigError,
        match=r'salt_disk_quota = "10%" \(kv_connector_extra_config\) has no effect without disk',
    ):
        load_config({"salt_disk_quota": "10%"}, {})
