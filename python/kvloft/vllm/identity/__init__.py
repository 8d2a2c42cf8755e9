"""What an engine's KV depends on besides a prompt's content: its namespace, its weights, its
adapters.
"""
