"""Tiny random models with every KV cache group type that vLLM supports (see README.md)."""
