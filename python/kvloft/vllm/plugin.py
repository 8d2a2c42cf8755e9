"""vLLM's plugin entry point: makes ``"kv_connector": "KVLoftConnector"`` known by name in every vLLM process.

It also has wrong settings told before any weights are loaded. It must not import the connector: engines without kvloft load this.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvloft.config import load_config
from kvloft.errors import ConfigError
from kvloft.machine import refuse_here
from kvloft.vllm.identity.weights import note_start

NAME = "KVLoftConnector"
MODULE = "kvloft.vllm.connector"


def register() -> None:
    """Register the connector by name; vLLM may call this more than once in a process."""
    note_start()
    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001 - vLLM offers no public question
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    check_settings_early(KVConnectorFactory)


def check_settings_early(factory: Any) -> None:
    """Have ``factory`` read kvloft's settings when it looks up kvloft's class, and raise ConfigError if they are wrong.

    vLLM makes connectors after it has loaded the weights, but asks for the class while it checks its arguments (does it know
    the hybrid KV cache manager?), with the settings at hand. No hook of a connector is called then in every mode. What was
    found right is not read again: a file that changes later ends no engine that runs.
    """
    original = getattr(factory, "get_connector_class", None)
    if original is None or hasattr(original, "kvloft_checks"):
        return
    right: set[str] = set()

    @wraps(original)
    def get_connector_class(kv_transfer_config: Any, *args: Any, **kwargs: Any) -> Any:
        connector = original(kv_transfer_config, *args, **kwargs)
        if getattr(connector, "__module__", None) == MODULE:
            extra = kv_transfer_config.kv_connector_extra_config or {}
            if repr(extra) not in right:
                try:
                    refuse_here(load_config(extra))
                except ConfigError as error:
                    raise ConfigError(f"kvloft: {error}") from error  # inside a ValidationError of vLLM's, say
                right.add(repr(extra))
        return connector

    get_connector_class.kvloft_checks = True  # type: ignore[attr-defined]
    factory.get_connector_class = staticmethod(get_connector_class)
