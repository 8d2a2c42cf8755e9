"""Identifies everything except the prompt that determines KV: namespace, weights and adapters."""
