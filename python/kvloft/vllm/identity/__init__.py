"""Identifies everything that determines KV, except the prompt: namespace, weights and adapters."""
