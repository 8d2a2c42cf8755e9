"""vLLM's plugin entry point: makes ``"kv_connector": "KVLoftConnector"`` known by name in every vLLM process."""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

NAME = "KVLoftConnector"


def register() -> None:
    """Register the connector by name; vLLM may call this more than once in a process."""
    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001 - vLLM offers no public question
        KVConnectorFactory.register_connector(NAME, "kvloft.vllm.connector", NAME)
