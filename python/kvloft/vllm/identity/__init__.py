"""Identifies all inputs to KV other than the prompt: namespace, weights and adapters."""
