"""Tiny random models of every kind of KV cache group that vLLM serves; README.md lists them."""
