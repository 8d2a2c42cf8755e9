"""The `kvloft` command: config, inspect, verify, bench. It knows neither vLLM nor torch, so that it runs anywhere."""
