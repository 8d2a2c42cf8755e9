"""The `kvloft` command: config, inspect, verify. It must know neither vLLM nor torch, so that it runs anywhere."""
