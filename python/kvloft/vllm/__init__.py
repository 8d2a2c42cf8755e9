"""The vLLM integration. ``kv_connector_module_path: "kvloft.vllm"`` loads its connector."""

from kvloft.vllm.connector import KVLoftConnector
from kvloft.vllm.plugin import register_classes

register_classes()  # the plugin does not run if VLLM_PLUGINS excludes kvloft

__all__ = ["KVLoftConnector"]
