"""What KV depends on besides a prompt's content: namespace, weights, adapters."""
