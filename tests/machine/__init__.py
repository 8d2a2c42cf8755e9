"""The correctness machine: vLLM's real schedulers and both real sides of kvloft, with symbols as
KV, and the oracles that check them.
"""
