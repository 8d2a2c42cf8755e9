"""Tiny random models that cover every KV cache group type in vLLM (see README.md)."""
