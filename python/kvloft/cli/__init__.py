"""The `kvloft` command: config, check, serve, status, inspect, verify, bench. It knows neither vLLM
nor torch: it runs anywhere.
"""
