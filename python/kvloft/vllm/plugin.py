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
from kvloft.vllm.patches import FIND_CLASS, MEDIA_INPUTS, wrap
from kvloft.vllm.ranks import watch

NAME = "KVLoftConnector"
CLASS_NAMES = (NAME, "KVLoftGroupsConnector")
MODULE = "kvloft.vllm.connector"


def register() -> None:
    """Register the connector by name. vLLM may call this more than once per process."""
    note_start()
    register_classes()
    check_settings_early(KVConnectorFactory)
    keep_media_inputs()
    watch()


def register_classes() -> None:
    """Register every connector class under its class name.

    Users specify only `NAME`, but MultiConnector looks up a child's statistics by its class's
    ``__name__``.
    """
    for name in CLASS_NAMES:
        if name not in KVConnectorFactory._registry:  # noqa: SLF001 - vLLM has no public lookup
            KVConnectorFactory.register_connector(name, MODULE, name)


def keep_media_inputs() -> None:
    """Keep the user's settings for media embedding inputs in engines that use only kvloft.

    vLLM accepts such inputs, even without tensors, if a connector is a KV consumer, because another
    engine's KV may replace the tensors. kvloft is a consumer (``kv_both``) but may miss, and an
    engine that has to compute an input without a tensor stops.
    """

    def resolve(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        config = args[0]
        media = getattr(config.model_config, "multimodal_config", None)
        is_enabled = getattr(media, "enable_mm_embeds", False)
        method(*args, **kwargs)
        transfer, encoder = config.kv_transfer_config, config.ec_transfer_config
        is_alone = transfer is not None and transfer.kv_connector in CLASS_NAMES
        if media is not None and is_alone and not (encoder and encoder.is_ec_consumer):
            media.enable_mm_embeds, media.allow_missing_mm_embeddings = is_enabled, False

    wrap(MEDIA_INPUTS, resolve)


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
                except ConfigError as error:  # vLLM may wrap the error (ValidationError)
                    raise ConfigError(f"kvloft: {error}") from error
                right[repr(extra)] = config.kv_groups
            return sys.modules[MODULE].class_of(right[repr(extra)])
        return connector

    wrap(FIND_CLASS, get_connector_class, factory)
