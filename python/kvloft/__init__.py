"""kvloft: an external KV cache for vLLM. Importing this loads neither torch nor vllm."""


def __getattr__(name: str) -> str:
    """Return ``__version__``, which the extension carries; loaded on first use, to keep the import of kvloft light."""
    if name == "__version__":
        from kvloft.version import VERSION

        return VERSION
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
