"""Benchmarks of whole engines on a GPU.

Run them from the repository's root, for example `python -m benches.gpu.engine --help`.
"""
