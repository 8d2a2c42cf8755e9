"""Settings: their table, units of values, the environment, and merged sources."""

from kvloft.config.environment import (
    MAX_SOCKET_BYTES,
    child_environment,
    engine_environment,
    server_environment,
)
from kvloft.config.sources import describe, first_twice, load_config
from kvloft.config.table import AUTO, FROM_DEFAULT, KEYS, OF_LIMITS, OF_STORE, Config, parse_socket
from kvloft.config.units import (
    MAX_TTL_S,
    HintError,
    Quota,
    format_quota,
    format_size,
    format_ttl,
    has_unit,
    parse_quota,
    parse_seconds,
    parse_size,
    parse_ttl,
    size_text,
)

__all__ = [
    "AUTO",
    "FROM_DEFAULT",
    "KEYS",
    "MAX_SOCKET_BYTES",
    "MAX_TTL_S",
    "OF_LIMITS",
    "OF_STORE",
    "Config",
    "HintError",
    "Quota",
    "child_environment",
    "describe",
    "engine_environment",
    "first_twice",
    "format_quota",
    "format_size",
    "format_ttl",
    "has_unit",
    "load_config",
    "parse_quota",
    "parse_seconds",
    "parse_size",
    "parse_socket",
    "parse_ttl",
    "server_environment",
    "size_text",
]
