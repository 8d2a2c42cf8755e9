"""Tiny random models with every type of KV cache group that vLLM supports (see README.md)."""
