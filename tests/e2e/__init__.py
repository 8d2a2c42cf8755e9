"""End-to-end tests: real vLLM engines on the CPU, with and without kvloft, compared token by token.

Nothing here imports vLLM in the test process: engines live in child processes (zygote.py), so that
a restart is a restart and a kill is a kill.
"""
