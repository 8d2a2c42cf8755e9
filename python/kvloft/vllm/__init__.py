"""The vLLM glue, and the only folder that imports vllm. ``kv_connector_module_path: "kvloft.vllm"`` finds the connector here."""

from kvloft.vllm.connector import KVLoftConnector

__all__ = ["KVLoftConnector"]
