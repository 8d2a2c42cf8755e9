"""The `kvloft` command. Imports neither vLLM nor torch, so it runs anywhere."""
