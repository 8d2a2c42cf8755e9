"""The `kvloft` command: config, check, serve, status, inspect, verify, bench. Uses neither vLLM nor
torch, so it runs anywhere.
"""
