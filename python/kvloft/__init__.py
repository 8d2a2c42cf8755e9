"""kvloft: an external KV cache for vLLM. Importing this loads neither torch nor vllm."""

__version__ = "0.1.0"
