"""A symbolic engine: vLLM's real schedulers, kvloft's real halves, and a model whose KV is the hash of its prefix.

Every block that is read is checked token by token, so a wrong page is found in the step that reads it.
"""
