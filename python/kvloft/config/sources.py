"""Merges the settings from all sources. From highest to lowest precedence, these are vLLM's
``kv_connector_extra_config`` (or a command line), ``KVLOFT_*`` environment variables, the YAML file
that ``KVLOFT_CONFIG`` names, and defaults.

This module must not import vLLM or the extension. Checks that need the model live elsewhere.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvloft.config.environment import ENV_FILE, ENV_PREFIX, environment, setting_variables
from kvloft.config.table import AUTO, KEYS, OF_STORE, Config, is_checked_for_unit
from kvloft.config.units import HintError, format_size, has_unit
from kvloft.errors import ConfigError

FROM_EXTRA: Final = "kv_connector_extra_config"
MAX_SHOWN: Final = 80
"""Maximum number of characters that an error message quotes from an invalid value."""
_Layer = dict[str, tuple[object, str]]
"""Maps each key that a source sets to its value and origin."""

_NOT_NEEDED: Final = "kvloft does not need this setting; remove it"
_NO_EQUIVALENT: Final = "kvloft has no equivalent; remove it"
_IN_BACKGROUND: Final = "kvloft copies in the background and does not need this setting; remove it"
_NO_GDS: Final = "kvloft does not use GPUDirect Storage; remove this setting"
_ONE_HOST: Final = "kvloft runs on a single host and does not support this setting; remove it"
_PREFIXES: Final = "kvloft reuses only prefixes and does not support this setting; remove it"
_HOST_SIZE: Final = 'use host_size, for example "32GiB"'
_SERVER: Final = 'use server, for example "unix:/run/kvloft/kvloft.sock"'
_TIMEOUT: Final = 'use load_timeout, for example "10s"'
_DISK_PATH: Final = 'use disk_path, for example "/var/cache/kvloft"'
_DISK_SIZE: Final = 'use disk_size, for example "500GiB"'
_SAVE: Final = 'use save = "prompt" to skip generated tokens'

_LMCACHE: Final = {
    "config_file": "set the environment variable KVLOFT_CONFIG to a YAML file of kvloft's settings",
    "local_cpu": _HOST_SIZE,
    "max_local_cpu_size": _HOST_SIZE,
    "l1_size_gb": _HOST_SIZE,
    "reserve_local_cpu_size": _NOT_NEEDED,
    "local_disk": _DISK_PATH,
    "max_local_disk_size": _DISK_SIZE,
    "blocking_timeout_secs": _TIMEOUT,
    "mp_host": _SERVER,
    "mp_port": _SERVER,
    "rpc_port": _NOT_NEEDED,
    "chunk_size": _NOT_NEEDED,
    "save_decode_cache": _SAVE,
    "min_retrieve_tokens": _NOT_NEEDED,
    "save_unfull_chunk": _NOT_NEEDED,
    "use_layerwise": _IN_BACKGROUND,
    "enable_async_loading": _IN_BACKGROUND,
    "gds_path": _NO_GDS,
    "gds_buffer_size": _NO_GDS,
    "cufile_buffer_size": _NO_GDS,
    "extra_config": _NO_EQUIVALENT,
    "pre_caching_hash_algorithm": _NOT_NEEDED,
    "cache_policy": 'use eviction = "adaptive" or "lru"',
    "instance_id": "kvloft does not need this setting; use namespace to separate engines",
    "remote_url": f"on a single host, {_SERVER}; kvloft does not support remote hosts",
    "remote_serde": _ONE_HOST,
    "numa_mode": "use `kvloft serve` with --numa, for example --numa 0,0,1,1",
    "enable_p2p": _ONE_HOST,
    "enable_pd": "combine NixlConnector with kvloft in MultiConnector",
    "enable_blending": _PREFIXES,
    "enable_controller": "use vLLM's --kv-events-config; kvloft adds its events to vLLM's",
}
_OFFLOADING: Final = {
    "cpu_bytes_to_use": _HOST_SIZE,
    "num_cpu_blocks": _HOST_SIZE,
    "block_size": _NOT_NEEDED,
    "eviction_policy": 'use eviction = "adaptive" or "lru"',
    "root_dir": _DISK_PATH,
    "spec_name": _NOT_NEEDED,
    "store_threshold": "kvloft saves each chunk the first time it is computed; remove this setting",
    "secondary_tiers": "use disk_path and disk_size for a disk tier",
}
"""The kvloft equivalents of LMCache and OffloadingConnector settings, for error messages.
docs/migrating.md lists the equivalents with examples.
"""


def load_config(
    extra: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    extra_origin: str = FROM_EXTRA,
    is_complete: bool = True,
) -> Config:
    """Merge all sources into a Config.

    ``extra`` holds vLLM's kv_connector_extra_config or the settings from the source that
    ``extra_origin`` names. ``environ`` defaults to the process environment. Raises ConfigError if
    a setting is invalid or, unless ``is_complete`` is False, contradicts another setting.
    """
    environ = environment() if environ is None else environ
    given = _from_mapping(extra or {}, extra_origin)
    layers = [  # from lowest to highest precedence; variables and flags are never null
        (_from_file(environ), True),
        (_from_environ(environ), False),
        (given, extra_origin == FROM_EXTRA),
    ]
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    bare_numbers: dict[str, float] = {}
    for layer, may_be_null in layers:  # overridden values must also be valid
        for key, (raw, origin) in layer.items():
            values[key] = value = _parse(key, raw, origin, may_be_null)
            origins[key] = origin
            bare_numbers.pop(key, None)
            if is_checked_for_unit(key, value) and not has_unit(raw):
                bare_numbers[key] = value  # type: ignore[assignment]  # a number
    if is_complete:
        _refuse_contradictions(values, origins)
    return Config(**values, origins=origins, bare_numbers=bare_numbers)  # type: ignore[arg-type]  # each value was parsed


def _refuse_contradictions(values: Mapping[str, object], origins: Mapping[str, str]) -> None:
    for key in ("disk_size", "salt_disk_quota"):
        if values.get(key) is not None and values.get("disk_path") is None:
            size = KEYS[key].show(values[key])
            raise ConfigError(
                f'{key} = "{size}" ({origins[key]}) has no effect without disk_path; set disk_path '
                f"or remove {key}."
            )
    # The server may read the same file and environment, so check only the extra config.
    misplaced = [key for key in OF_STORE if origins.get(key) == FROM_EXTRA]
    if misplaced and values.get("server") not in (None, AUTO):
        raise ConfigError(
            f"{misplaced[0]} ({FROM_EXTRA}) has no effect when server is set; pass it to `kvloft "
            "serve`, or remove server."
        )


def describe(config: Config) -> list[tuple[str, str, str]]:
    """Return (key, value as text, origin) for each setting, in `KEYS` order."""
    return [
        (key, setting.show(getattr(config, key)), config.origin(key))
        for key, setting in KEYS.items()
    ]


def _from_mapping(given: Mapping[str, object], origin: str) -> _Layer:
    _refuse_foreign([(_shown(key), key, value) for key, value in given.items()], origin)
    return {_known(key, origin): (value, origin) for key, value in given.items()}


def _from_environ(environ: Mapping[str, str]) -> _Layer:
    def spell(key: str) -> str:
        return f"{ENV_PREFIX}{key.upper()}"

    found = list(setting_variables(environ))
    _refuse_foreign(found, "environment")
    return {
        _known(key, "environment", spell, name): (value, f"environment variable {name}")
        for name, key, value in found
    }


def _from_file(environ: Mapping[str, str]) -> _Layer:
    path = environ.get(ENV_FILE)
    if not path:
        return {}
    blame = f"{ENV_FILE} = {path!r} (environment)"
    wanted = "write lines such as: host_size: 8GiB."
    document, node = read_yaml(path, blame, wanted)
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{blame} has a top-level {type(document).__name__}; {wanted}")
    if twice := first_twice(keys_of(node)):
        raise ConfigError(f"{blame} sets {twice} twice; remove one of the two lines.")
    return _from_mapping(document, f"file {path}")


def read_yaml(path: str, blame: str, wanted: str) -> tuple[Any, Any]:
    """Return a YAML file's document and root node. Raises ConfigError.

    The file may contain secrets, so error messages must not quote it.
    """
    import yaml  # imported lazily: it takes a fifth of the server's startup time

    try:
        # open() raises ValueError for a NUL character in the path.
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            text = file.read()
        return yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise ConfigError(f"{blame} is nested too deeply; {wanted}") from None
    except OSError as e:
        raise ConfigError(
            f"{blame} cannot be read ({e.strerror}); it must name a YAML file."
        ) from None
    except (yaml.YAMLError, ValueError) as e:
        mark = getattr(e, "problem_mark", None)
        where = f" (see line {mark.line + 1})" if mark is not None else ""
        raise ConfigError(f"{blame} is not valid YAML{where}; {wanted}") from None


def keys_of(node: Any) -> list[str]:
    """Return a YAML mapping's keys, including repeated keys, which PyYAML silently merges.

    Returns an empty list for any other node.
    """
    return [key.value for key, _ in node.value] if node.id == "mapping" else []


def first_twice(keys: Sequence[str]) -> str | None:
    """Return the first repeated key, or None."""
    return next((key for i, key in enumerate(keys) if key in keys[:i]), None)


def _refuse_foreign(given: Sequence[tuple[str, object, object]], origin: str) -> None:
    """Raise ConfigError if any (name, key, value) row contains another cache's setting."""
    found = [
        f"{name} ({origin}) {other}"
        for name, key, value in given
        if not (isinstance(key, str) and key in KEYS) and (other := _equivalent(str(key), value))
    ]
    if found:
        raise ConfigError(f"{'; '.join(found)}.")


def _known(
    key: object, origin: str, spell: Callable[[str], str] = str, written: str | None = None
) -> str:
    if isinstance(key, str) and key in KEYS:
        return key
    import difflib  # imported lazily: slow, and needed only for this error

    name = _shown(key) if written is None else written
    near = difflib.get_close_matches(str(key).lower(), KEYS, n=1, cutoff=0.7)
    known = f"valid keys are {', '.join(map(spell, KEYS))}."
    hint = f"did you mean {spell(near[0])}?" if near else known
    raise ConfigError(f"{name} ({origin}) is not a kvloft setting; {hint}")


def _equivalent(key: str, value: object = None) -> str | None:
    """Return the text that follows the key in an error about another cache's setting.

    The text includes the converted ``value`` if a conversion is possible. Returns None if the key
    is unknown.
    """
    name = re.sub(r"^lmcache[._](mp\.)?", "", key.lower())
    if key.lower().startswith("lmcache.mp."):
        name = f"mp_{name}"
    cache, fixes = "an LMCache setting", _LMCACHE
    if name in _OFFLOADING:
        cache, fixes = "an OffloadingConnector setting", _OFFLOADING
    elif key.lower().startswith("lmcache"):
        fixes = {name: _NO_EQUIVALENT} | _LMCACHE
    if name not in fixes:
        return None
    return f"is {cache}; {_converted(name, value) or fixes[name]}"


def _converted(name: str, value: object) -> str | None:
    if value is None or name not in _VALUES:
        return None
    setting, convert = _VALUES[name]
    note = " for each GPU, because host_size is per engine" if name == "max_local_cpu_size" else ""
    try:
        return f'use {setting} = "{convert(value)}"{note}'
    except (ValueError, ArithmeticError):
        return None


def _gib(value: object) -> str:
    return f"{float(str(value)):g}GiB"


def _path(value: object) -> str:
    text = str(value).removeprefix("file:")
    if not text.startswith("/") or "," in text:
        raise ValueError(value)
    return f"/{text.lstrip('/')}"


def _policy(value: object) -> str:
    if str(value).lower() != "lru":
        raise ValueError(value)
    return "lru"


def _bytes(value: object) -> str:
    return format_size(int(str(value)))


def _save(value: object) -> str:
    return "all" if str(value).lower() in ("true", "1") else "prompt"


_VALUES: Final[dict[str, tuple[str, Callable[[object], str]]]] = {
    "max_local_cpu_size": ("host_size", _gib),
    "l1_size_gb": ("host_size", _gib),
    "cpu_bytes_to_use": ("host_size", _bytes),
    "local_disk": ("disk_path", _path),
    "root_dir": ("disk_path", _path),
    "max_local_disk_size": ("disk_size", _gib),
    "blocking_timeout_secs": ("load_timeout", lambda value: f"{float(str(value)):g}s"),
    "save_decode_cache": ("save", _save),
    "cache_policy": ("eviction", _policy),
}
"""Maps each key whose value can be converted to the kvloft setting and the conversion function."""


def _parse(key: str, raw: object, origin: str, may_be_null: bool) -> object:
    setting = KEYS[key]
    try:
        return setting.parse(raw)
    except HintError as e:
        raise ConfigError(f"{key} = {_shown(raw)} ({origin}) {e}") from None
    except (ValueError, TypeError, ArithmeticError):
        null = f", or null for {setting.null}" if setting.null and may_be_null else ""
        raise ConfigError(
            f"{key} = {_shown(raw)} ({origin}) is not allowed; it must be {setting.allowed}{null}."
        ) from None


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()  # "true" or "false", as in YAML and JSON
    is_plain = isinstance(value, str) and value.isprintable() and '"' not in value
    text = f'"{value}"' if is_plain else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
