"""The correctness machine: vLLM's real schedulers and kvloft's real halves over KV of symbols, and
the oracles that judge them.
"""
