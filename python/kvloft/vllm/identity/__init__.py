"""Everything that decides an engine's KV except the prompt: namespace, weights and adapters."""
