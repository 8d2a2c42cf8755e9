"""The `kvloft` command: config, serve, status, inspect, verify, bench. It knows neither vLLM nor torch: it runs anywhere."""
