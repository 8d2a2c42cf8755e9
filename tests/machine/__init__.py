"""The correctness machine: vLLM's real schedulers and both real sides of kvloft run with symbols
instead of KV, and oracles check their behavior.
"""
