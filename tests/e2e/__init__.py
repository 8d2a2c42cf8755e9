"""End-to-end tests: compare real vLLM engines' outputs on the CPU, with and without kvloft.

The test process never imports vLLM. Engines run in child processes (zygote.py), so tests
really restart and kill them.
"""
