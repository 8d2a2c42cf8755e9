"""The vLLM glue. ``kv_connector_module_path: "kvloft.vllm"`` finds the connector here."""

from kvloft.vllm.connector import KVLoftConnector
from kvloft.vllm.plugin import register_classes

register_classes()  # vLLM runs no plugin where VLLM_PLUGINS excludes kvloft

__all__ = ["KVLoftConnector"]
