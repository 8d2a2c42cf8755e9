"""The entry point of the vLLM plugin, which registers ``KVLoftConnector`` in every vLLM process.

The plugin also reports invalid settings before vLLM loads weights, and records all ranks' KV cache
configs. Engines without kvloft load this module too, so it must not import the connector.
"""

import sys
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvloft.config.sources import load_config
from kvloft.errors import ConfigError
from kvloft.machine import refuse_here
from kvloft.vllm.identity.weights import note_start
from kvloft.vllm.patches import FIND_CLASS, wrap
from kvloft.vllm.ranks import watch

NAME = "KVLoftConnector"
CLASS_NAMES = (NAME, "KVLoftGroupsConnector")
MODULE = "kvloft.vllm.connector"


def register() -> None:
    """Register the connector by name. vLLM may call this more than once per process."""
    note_start()
    register_classes()
    check_settings_early(KVConnectorFactory)
    watch()


def register_classes() -> None:
    """Register every connector class under its class name.

    Users specify only `NAME`, but MultiConnector looks up a child's statistics by its class's
    ``__name__``.
    """
    for name in CLASS_NAMES:
        if name not in KVConnectorFactory._registry:  # noqa: SLF001 - vLLM has no public lookup
            KVConnectorFactory.register_connector(name, MODULE, name)


def check_settings_early(factory: Any) -> None:
    """Make ``factory`` check kvloft's settings when it looks up kvloft's class. The lookup raises
    ConfigError if the settings are invalid.

    vLLM creates connectors after loading the weights, but looks up the class earlier, while
    checking its arguments. vLLM has no connector hook that it always calls at this point. Valid
    settings are not reread, so a later change to the settings file does not stop a running engine.
    """
    right: dict[str, str] = {}

    def get_connector_class(
        method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        connector = method(*args, **kwargs)
        if getattr(connector, "__module__", None) == MODULE:
            transfer = args[0] if args else kwargs["kv_transfer_config"]
            extra = transfer.kv_connector_extra_config or {}
            if repr(extra) not in right:
                try:
                    config = load_config(extra)
                    refuse_here(config)
                except ConfigError as error:  # vLLM may wrap it, for example in ValidationError
                    raise ConfigError(f"kvloft: {error}") from error
                right[repr(extra)] = config.kv_groups
            return sys.modules[MODULE].class_of(right[repr(extra)])
        return connector

    wrap(FIND_CLASS, get_connector_class, factory)
