"""The `kvloft` command: config, inspect, verify, calibrate, bench. It knows neither vLLM nor torch, so that it runs anywhere."""
