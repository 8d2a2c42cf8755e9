"""End-to-end tests: real vLLM engines on the CPU, with and without kvloft, compared token by token.

The test process never imports vLLM. Engines run in child processes (zygote.py), so tests
really restart and kill them.
"""
