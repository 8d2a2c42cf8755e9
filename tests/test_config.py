"""Tests the settings: the precedence of sources, parsed values, and the error message for every
invalid setting.
"""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloft.config.sources import describe, load_config
from kvloft.config.table import KEYS, OF_LIMITS, Config
from kvloft.config.units import format_size, has_unit, parse_seconds, parse_size
from kvloft.errors import ConfigError

GOOD = {
    "host_size": st.integers(4096, 1 << 60).flatmap(
        lambda n: st.sampled_from([n, str(n), format_size(n)])
    ),
    "disk_size": st.integers(4096, 1 << 60).flatmap(
        lambda n: st.sampled_from([n, str(n), format_size(n)])
    ),
    "namespace": st.text(st.characters(exclude_categories=["Cs"])),
    "save": st.sampled_from(["all", "prompt"]),
    "eviction": st.sampled_from(["adaptive", "lru"]),
    "on_pause": st.sampled_from(["keep", "clear"]),
    "kv_groups": st.sampled_from(["auto", "one", "all"]),
    "compression": st.sampled_from(["auto", "off"]),
    "disk_threads": st.integers(1, 64),
    "server_timeout": st.integers(1, 3600).map(lambda s: f"{s}s"),
    "salt_quota": st.none()
    | st.integers(0, 100).map(lambda n: f"{n}%")
    | st.integers(0, 1 << 60)
    | st.integers(0, 100).map(lambda n: n / 100),
    "salt_disk_quota": st.none()
    | st.integers(0, 100).map(lambda n: f"{n}%")
    | st.integers(0, 1 << 60).map(format_size),
    "salt_ttl": st.integers(1, 3650).flatmap(
        lambda n: st.sampled_from([n, f"{n}s", f"{n}min", f"{n}h", f"{n}d"])
    ),
    "load_timeout": st.integers(0, 3600) | st.integers(0, 3600).map(lambda s: f"{s}s"),
}
JUNK = (
    st.none()
    | st.booleans()
    | st.integers(max_value=-1)
    | st.floats(max_value=-1e-9)
    | st.sampled_from(
        [
            float("nan"),
            float("inf"),
            1 << 70,
            1e30,
            "",
            " ",
            "-1",
            "1..0",
            "8 GiBs",
            "٣GiB",
            "0x10",
            "1e3",
            "\ud800",
        ]
    )
    | st.binary()
    | st.lists(st.integers())
    | st.dictionaries(st.text(), st.integers())
)


def one_sentence(error: pytest.ExceptionInfo[ConfigError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 500
    assert not re.search(r"\. [A-Z]", text), "more than one sentence"
    return text


def test_defaults_need_no_source() -> None:
    config = load_config({}, {})
    assert config == Config()
    assert (config.host_size, config.disk_path, config.disk_bytes) == (4 << 30, None, 0)
    assert {origin for _, _, origin in describe(config)} == {"default"}
    assert [key for key, _, _ in describe(config)] == list(KEYS)


def test_stronger_source_wins_and_is_named(tmp_path: Path) -> None:
    file = tmp_path / "kvloft.yaml"
    file.write_text("host_size: 1GiB\neviction: adaptive\ndisk_path: /cache\ndisk_threads: 5\n")
    environ = {
        "KVLOFT_CONFIG": str(file),
        "KVLOFT_HOST_SIZE": "2GiB",
        "KVLOFT_EVICTION": "lru",
        "PATH": "/bin",
    }
    config = load_config({"host_size": "3GiB"}, environ)
    assert (config.host_size, config.eviction, config.disk_path, config.disk_threads) == (
        3 << 30,
        "lru",
        "/cache",
        5,
    )
    assert config.origin("host_size") == "kv_connector_extra_config"
    assert config.origin("eviction") == "environment variable KVLOFT_EVICTION"
    assert config.origin("disk_path") == f"file {file}"
    assert config.origin("namespace") == "default"
    assert config.disk_bytes == 64 << 30


def test_null_disk_path_switches_the_disk_tier_off_over_a_weaker_source() -> None:
    config = load_config({"disk_path": None}, {"KVLOFT_DISK_PATH": "/cache"})
    assert config.disk_path is None
    assert config.disk_bytes == 0


def test_an_unknown_users_home_is_no_folder_named_tilde() -> None:
    with pytest.raises(ConfigError, match="disk_path"):
        load_config({"disk_path": "~no-user-has-this-name/cache"}, {})


def test_disk_path_is_absolute_and_tilde_is_the_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert load_config({"disk_path": "cache"}, {}).disk_path == str(tmp_path / "cache")
    assert load_config({"disk_path": "~/cache"}, {}).disk_path == "/home/someone/cache"


def test_empty_environment_variable_means_not_given() -> None:
    assert (
        load_config(
            {}, dict.fromkeys(["KVLOFT_HOST_SIZE", "KVLOFT_DISK_PATH", "KVLOFT_CONFIG"], "")
        )
        == Config()
    )


@pytest.mark.parametrize(
    "name",
    [
        "SERVICE_HOST",
        "SERVICE_PORT",
        "SERVICE_PORT_HTTP",
        "PORT",
        "PORT_8000_TCP",
        "PORT_8000_TCP_ADDR",
        "DISK_SERVICE_HOST",
    ],
)
def test_kubernetes_service_variables_are_not_settings(name: str) -> None:
    assert load_config({}, {f"KVLOFT_{name}": "10.0.0.1"}) == Config()


@pytest.mark.parametrize("name", ["HOST", "SERVICE", "PORTS", "PORT_TCP", "SERVICE_HOSTS"])
def test_similar_names_are_mistakes(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a kvloft setting"):
        load_config({}, {f"KVLOFT_{name}": "10.0.0.1"})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("500MB", 500_000_000),
        ("1.5kib", 0),
        ("4.5 KiB", 4608),
        ("4096", 4096),
        (4096.0, 4096),
        ("1TiB", 1 << 40),
        ("2Gi", 2 << 30),
        ("32G", 32 * 10**9),
    ],
)
def test_sizes_are_read_as_written(text: object, size: int) -> None:
    if size == 0:
        with pytest.raises(ValueError):
            parse_size(text)
    else:
        assert parse_size(text) == size


@pytest.mark.parametrize(
    "size", ["4095", "0", "1EiB", "4096.5", "1048577TiB", True, "GiB", "+8GiB", "8 Gi B"]
)
def test_sizes_out_of_range_or_malformed_are_refused(size: object) -> None:
    with pytest.raises(ValueError):
        parse_size(size)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10s", 10), ("250ms", 0.25), ("2min", 120), ("1h", 3600), (0, 0), ("1.5", 1.5)],
)
def test_times_are_read_as_written(text: object, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["61min", "1d", "-1s", "3600001ms", None, "s"])
def test_times_out_of_range_or_malformed_are_refused(text: object) -> None:
    with pytest.raises(ValueError):
        parse_seconds(text)


@given(st.integers(4096, 1 << 60))
def test_size_survives_being_written_and_read(size: int) -> None:
    assert parse_size(format_size(size)) == size and has_unit(format_size(size))


@given(st.fixed_dictionaries({}, optional=GOOD))
def test_output_of_describe_loads_to_the_same_settings(extra: dict[str, object]) -> None:
    extra["disk_path"] = "/cache"
    config = load_config(extra, {})
    names = {"namespace": config.namespace, "server": config.server}
    unset = {key: None for key in KEYS if getattr(config, key) is None}
    shown = {key: names.get(key, text) for key, text, _ in describe(config)} | unset
    assert load_config(shown, {}) == config
    assert (
        load_config(json.loads(json.dumps({key: getattr(config, key) for key in KEYS})), {})
        == config
    )
    assert all(config.origin(key) == "kv_connector_extra_config" for key in extra)


@pytest.mark.parametrize("origin", ["extra", "environment"])
def test_a_server_is_a_socket(origin: str) -> None:
    for text, path in [
        ("unix:/run/kv.sock", "/run/kv.sock"),
        ("/run/kv.sock", "/run/kv.sock"),
        ("unix:~/kv", str(Path("~/kv").expanduser())),
    ]:
        config = (
            load_config({"server": text}, {})
            if origin == "extra"
            else load_config({}, {"KVLOFT_SERVER": text})
        )
        assert config.server == path
    for wrong in ("tcp://host:1", "kv.sock", "unix:", "unix:/" + "x" * 107, 7):
        with pytest.raises(
            ConfigError,
            match=r"server = .* is not allowed; it must be \"auto\" or a path of at most 107 bytes",
        ):
            load_config({"server": wrong}, {})
    assert ("server", "unix:/s", "kv_connector_extra_config") in describe(
        load_config({"server": "unix:/s"}, {})
    )


def test_server_settings_need_server_auto() -> None:
    with pytest.raises(
        ConfigError, match=r"host_size \(kv_connector_extra_config\) has no effect when server"
    ):
        load_config({"server": "unix:/s", "host_size": "1GiB"}, {})
    starting = load_config({"server": "auto", "host_size": "1GiB", "disk_path": "/cache"}, {})
    assert (starting.server, starting.host_size, starting.server_linger) == (
        "auto",
        1 << 30,
        300.0,
    ), "the setting is passed to the server"
    assert ("server", "auto", "kv_connector_extra_config") in describe(starting)
    shared = load_config(
        {"server": "unix:/s"}, {"KVLOFT_HOST_SIZE": "1GiB"}
    )  # the server may use the same environment
    assert (shared.server, shared.host_size) == ("/s", 1 << 30)
    assert (
        load_config(
            {"server": "unix:/s", "host_size": "1GiB"}, {}, extra_origin="command line"
        ).host_size
        == 1 << 30
    )


@given(
    st.fixed_dictionaries(
        {}, optional={k: v.filter(lambda v: v is not None).map(str) for k, v in GOOD.items()}
    )
)
def test_environment_and_extra_config_read_values_alike(values: dict[str, str]) -> None:
    values = {key: value for key, value in values.items() if value and "\0" not in value} | {
        "disk_path": "/cache"
    }
    environ = {f"KVLOFT_{key.upper()}": value for key, value in values.items()}
    assert load_config({}, environ) == load_config(values, {})


@pytest.mark.parametrize("key", ["disk_path", "server", *OF_LIMITS])
def test_null_is_suggested_only_for_keys_that_allow_it(key: str, tmp_path: Path) -> None:
    """Environment variables and flags are plain text, where "null" is an ordinary word."""
    file = tmp_path / "kvloft.yaml"
    file.write_text(
        f"disk_path: /cache\n{key}: [1]\n" if key != "disk_path" else "disk_path: [1]\n"
    )
    given = {"disk_path": "/cache", key: [1]}
    for extra, environ, origin in (
        (given, {}, "kv_connector_extra_config"),
        ({}, {"KVLOFT_CONFIG": str(file)}, "kv_connector_extra_config"),
        (given, {}, "command line"),
        ({"disk_path": "/cache"}, {f"KVLOFT_{key.upper()}": "a\0b"}, "kv_connector_extra_config"),
    ):
        with pytest.raises(ConfigError) as error:
            load_config(extra, environ, extra_origin=origin)
        is_text = "command line" in str(error.value) or "variable" in str(error.value)
        assert (
            KEYS[key].null
            and (f", or null for {KEYS[key].null}." in one_sentence(error)) is not is_text
        )


def test_a_part_is_one_in_every_source(tmp_path: Path) -> None:
    file = tmp_path / "kvloft.yaml"
    for text in ("0.0", "0.1", "0.25", "1.0"):
        file.write_text(f"salt_quota: {text}\n")
        sources: list[tuple[dict[str, object], dict[str, str]]] = [
            ({}, {"KVLOFT_CONFIG": str(file)}),
            ({}, {"KVLOFT_SALT_QUOTA": text}),
            ({"salt_quota": text}, {}),
            ({"salt_quota": float(text)}, {}),
        ]
        read = [load_config(extra, environ).salt_quota for extra, environ in sources]
        assert [(type(quota), quota) for quota in read] == [(float, float(text))] * 4


ALWAYS_BAD = [
    True,
    False,
    -1,
    1 << 70,
    1e30,
    float("nan"),
    float("inf"),
    -float("inf"),
    b"8GiB",
    "\ud800",
    [],
    {},
    ["lru"],
    {"a": 1},
]


@pytest.mark.parametrize("junk", ALWAYS_BAD, ids=lambda junk: ascii(junk)[:12])
@pytest.mark.parametrize("key", KEYS)
def test_invalid_values_are_rejected_for_each_key(key: str, junk: object) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"disk_path": "/cache", key: junk}, {})
    assert one_sentence(error).startswith(f"{key} = ")


@pytest.mark.parametrize(
    ("key", "low", "high"), [("disk_threads", 1, 64), ("host_size", 4096, 1 << 60)]
)
def test_limits_are_themselves_allowed_and_nothing_beyond(key: str, low: int, high: int) -> None:
    for value in (low, high, str(low), str(high)):
        assert getattr(load_config({key: value}, {}), key) == int(value)
    for value in (low - 1, high + 1, str(low - 1), str(high + 1)):
        with pytest.raises(ConfigError):
            load_config({key: value}, {})


def test_a_path_with_nul_is_refused() -> None:
    with pytest.raises(ConfigError):
        load_config({"disk_path": "/cache\0"}, {})


def test_a_long_value_does_not_make_a_long_message() -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"host_size": "8" * 10_000}, {})
    one_sentence(error)


@given(st.sampled_from(sorted(KEYS)), JUNK)
def test_every_bad_value_is_reported_with_key_source_and_allowed_values(
    key: str, junk: object
) -> None:
    is_text = isinstance(junk, str) and junk != "\ud800"
    is_path = isinstance(junk, str) and is_text and bool(junk.strip())
    may_be_none = key in ("disk_path", "server", *OF_LIMITS)
    if (
        (may_be_none and junk is None)
        or (key in ("disk_path", "salt_limits") and is_path)
        or (key == "namespace" and is_text)
    ):
        return
    with pytest.raises(ConfigError) as error:
        load_config({"disk_path": "/cache", key: junk}, {})
    text = one_sentence(error)
    assert text.startswith(f"{key} = ")
    assert "(kv_connector_extra_config)" in text
    assert KEYS[key].allowed in text


@given(st.sampled_from(sorted(KEYS)), st.data())
def test_a_typo_is_answered_with_the_nearest_key(key: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(key) - 1))
    typo = key[:at] + key[at + 1 :]
    with pytest.raises(ConfigError) as error:
        load_config({typo: 1}, {})
    assert f"did you mean {key}?" in one_sentence(error)
    with pytest.raises(ConfigError) as error:
        load_config({}, {f"KVLOFT_{typo.upper()}": "1"})
    assert f"did you mean KVLOFT_{key.upper()}?" in one_sentence(error)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("max_local_cpu_size", None, 'an LMCache setting; use host_size, for example "32GiB".'),
        (
            "max_local_cpu_size",
            5,
            'an LMCache setting; use host_size = "5GiB" for each GPU, because',
        ),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE", "2.5", 'LMCache setting; use host_size = "2.5GiB" for each'),
        ("l1_size_gb", 60, 'an LMCache setting; use host_size = "60GiB".'),
        ("LMCACHE_CONFIG_FILE", "/x.yaml", "set the environment variable KVLOFT_CONFIG to a YAML"),
        ("gds_path", "/mnt/gds", "an LMCache setting; kvloft does not use GPUDirect Storage"),
        ("enable_async_loading", True, "an LMCache setting; kvloft copies in the background"),
        ("cache_policy", "LRU", 'an LMCache setting; use eviction = "lru".'),
        ("cache_policy", "LFU", 'an LMCache setting; use eviction = "adaptive" or "lru".'),
        ("local_disk", "/a,/b", 'an LMCache setting; use disk_path, for example "/var'),
        (
            "lmcache.chunk_size",
            1,
            "an LMCache setting; kvloft does not need this setting; remove it.",
        ),
        (
            "lmcache_rpc_port",
            1,
            "an LMCache setting; kvloft does not need this setting; remove it.",
        ),
        ("lmcache.mp.port", 1, "an LMCache setting; use server, for example"),
        ("mp_host", "a", "an LMCache setting; use server, for example"),
        ("lmcache.numa_mode", "auto", "an LMCache setting; use `kvloft serve` with --numa"),
        ("lmcache.zzz", 1, "an LMCache setting; kvloft has no equivalent; remove it."),
        (
            "lmcache_instance_id",
            1,
            "an LMCache setting; kvloft does not need this setting; use namespace",
        ),
        ("local_disk", "file:///mnt/c", 'use disk_path = "/mnt/c".'),
        ("local_disk", True, "use disk_path, for example"),
        ("blocking_timeout_secs", 10, 'use load_timeout = "10s".'),
        ("use_layerwise", True, "kvloft copies in the background and does not need this setting"),
        (
            "LMCACHE_ENABLE_P2P",
            True,
            "an LMCache setting; kvloft runs on a single host and does not",
        ),
        ("save_decode_cache", False, 'use save = "prompt".'),
        ("remote_url", "lm://a:65432", "on a single host, use server, for example"),
        ("min_retrieve_tokens", 512, "an LMCache setting; kvloft does not need this setting"),
        (
            "reserve_local_cpu_size",
            1,
            "an LMCache setting; kvloft does not need this setting; remove it.",
        ),
        ("cpu_bytes_to_use", 32 << 30, 'OffloadingConnector setting; use host_size = "32GiB".'),
        ("spec_name", "x", "Connector setting; kvloft does not need this setting; remove it."),
        ("store_threshold", 1, "OffloadingConnector setting; kvloft saves each chunk the first"),
    ],
)
def test_settings_of_other_caches_get_the_equivalent(key: str, value: object, wanted: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({key: value}, {})
    assert wanted in one_sentence(error)


def test_all_settings_of_other_caches_are_in_one_error() -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"max_local_cpu_size": 5, "host_size": "1GiB", "chunk_size": 256}, {})
    assert one_sentence(error) == (
        '"max_local_cpu_size" (kv_connector_extra_config) is an LMCache setting; use host_size = '
        '"5GiB" for each GPU, because host_size is per engine; "chunk_size" '
        "(kv_connector_extra_config) is an LMCache setting; kvloft does not need this setting; "
        "remove it."
    )
    with pytest.raises(ConfigError, match=r'^KVLOFT_L1_SIZE_GB .* use host_size = "60GiB"\.$'):
        load_config({}, {"KVLOFT_L1_SIZE_GB": "60"})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("disk_path", "file:///mnt/c", "is a URL; use /mnt/c."),
        ("disk_path", "s3://x", "is a URL; use a path on this machine."),
        ("salt_limits", "tcp://h:1/x", "is a URL; use a path on this machine."),
        ("host_size", "32", "has no unit; did you mean 32GiB?"),
        ("host_size", "2048", "has no unit; did you mean 2048MiB?"),
        ("staging_size", "80", "has no unit; did you mean 80MiB?"),
        ("load_timeout", "5m", "uses the ambiguous unit m; did you mean 5min?"),
        ("salt_ttl", "5m", "uses the ambiguous unit m; did you mean 5min?"),
    ],
)
def test_a_likely_mistake_is_answered_with_the_fix(key: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({key: value}, {})
    assert one_sentence(error) == f'{key} = "{value}" (kv_connector_extra_config) {said}'


def test_a_boolean_is_shown_as_in_yaml() -> None:
    with pytest.raises(ConfigError, match=r"^save = false "):
        load_config({"save": False}, {})


def test_a_key_that_is_hardly_similar_is_no_suggestion() -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"reserved_cpu": 1}, {})
    assert "did you mean" not in one_sentence(error)


def test_an_unknown_key_unlike_any_other_lists_all_keys() -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"zzz": 1}, {})
    assert all(key in one_sentence(error) for key in KEYS)


def test_a_bad_value_is_an_error_in_an_overridden_source_too() -> None:
    with pytest.raises(ConfigError, match="environment variable KVLOFT_HOST_SIZE"):
        load_config({"host_size": "1GiB"}, {"KVLOFT_HOST_SIZE": "huge"})


@pytest.mark.parametrize("timeout", [0, "0s", "500us", "0.0009"])
def test_a_server_timeout_at_which_every_lookup_would_miss_is_an_error(timeout: object) -> None:
    with pytest.raises(ConfigError, match="from 1ms to 1h"):
        load_config({"server_timeout": timeout}, {})
    assert load_config({"server_timeout": "1ms"}, {}).server_timeout == 0.001


def test_a_disk_size_that_does_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"disk_size": "8GiB"}, {})
    assert "without disk_path" in one_sentence(error)


@pytest.mark.parametrize(
    "content",
    [
        b"- 1\n- 2\n",
        b"host_size: [1\n",
        b"\xff\xfe\xfa",
        b"just text",
        b"a: b: c",
        b"? [1, 2]\n: 3\n",
        b"1: 2\n",
    ],
)
def test_a_file_without_a_mapping_is_reported_in_one_sentence(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_config({}, {"KVLOFT_CONFIG": str(file)})
    assert str(file) in one_sentence(error)


def test_a_deeply_nested_file_is_reported_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "deep.yaml"
    file.write_text("[" * 3000)
    with pytest.raises(ConfigError) as error:
        load_config({}, {"KVLOFT_CONFIG": str(file)})
    assert str(file) in one_sentence(error)


def test_a_file_that_sets_something_twice_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("host_size: 1GiB\neviction: lru\n'host_size': 2GiB\n")
    with pytest.raises(ConfigError, match="sets host_size twice") as error:
        load_config({}, {"KVLOFT_CONFIG": str(file)})
    assert str(file) in one_sentence(error)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing yet\n")
    assert load_config({}, {"KVLOFT_CONFIG": str(file)}) == Config()


@pytest.mark.parametrize("path", ["/does/not/exist.yaml", "/", "with\0nul"])
def test_an_unreadable_file_is_reported_in_one_sentence(path: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({}, {"KVLOFT_CONFIG": path})
    assert "KVLOFT_CONFIG" in one_sentence(error)
