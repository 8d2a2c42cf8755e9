"""The entry point of the vLLM plugin, which registers ``KVLoftConnector`` in every vLLM process.

The plugin also reports invalid settings before vLLM loads weights, and records the KV cache configs
of all ranks. This module must not import the connector, because engines without kvloft load it,
too.
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
    """Register the connector by name. vLLM may call this more than once in a process."""
    note_start()
    register_classes()
    check_settings_early(KVConnectorFactory)
    watch()


def register_classes() -> None:
    """Register every connector class under its class name.

    Users only specify `NAME`, but MultiConnector looks up the statistics class of a child by the
    ``__name__`` of the child's class.
    """
    for name in CLASS_NAMES:
        if name not in KVConnectorFactory._registry:  # noqa: SLF001 - vLLM has no public lookup
            KVConnectorFactory.register_connector(name, MODULE, name)


def check_settings_early(factory: Any) -> None:
    """Make ``factory`` check kvloft's settings when it looks up kvloft's class. The lookup raises
    ConfigError if they are invalid.

    vLLM creates connectors after it has loaded the weights, but looks up the class while it checks
    its arguments, when the settings are available. There is no connector hook that vLLM always
    calls at that point. Valid settings are not read again, so a file that changes later does not
    stop a running engine.
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
                except ConfigError as error:  # shown inside vLLM's ValidationError, for example
                    raise ConfigError(f"kvloft: {error}") from error
                right[repr(extra)] = config.kv_groups
            return sys.modules[MODULE].class_of(right[repr(extra)])
        return connector

    wrap(FIND_CLASS, get_connector_class, factory)
