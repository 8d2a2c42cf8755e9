"""kvloft: an external KV cache for vLLM. Importing this package imports neither torch nor vllm."""


def __getattr__(name: str) -> str:
    """Look up ``__version__`` lazily, because `kvloft.version` loads the extension."""
    if name == "__version__":
        from kvloft.version import VERSION

        return VERSION
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
