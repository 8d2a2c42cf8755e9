"""Tiny random models with every kind of KV cache group that vLLM supports; README.md lists them."""
