"""kvloft: an external KV cache for vLLM. Importing it loads neither torch nor vllm."""


def __getattr__(name: str) -> str:
    """Return ``__version__``. It loads the extension, so it is read on first use only."""
    if name == "__version__":
        from kvloft.version import VERSION

        return VERSION
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
