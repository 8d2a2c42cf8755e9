"""The correctness machine: vLLM's real schedulers and kvloft's real scheduler and worker sides run
with symbols instead of KV, and oracles check their behavior.
"""
