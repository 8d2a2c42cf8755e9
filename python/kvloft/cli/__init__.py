"""The `kvloft` command: config, check, inspect, verify, bench. It knows neither vLLM nor torch, so that it runs anywhere."""
