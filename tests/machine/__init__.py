"""The correctness machine: vLLM's real schedulers and both real sides of kvloft over KV of symbols,
and the oracles that check them.
"""
