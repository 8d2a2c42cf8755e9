"""Benchmarks of whole engines on a GPU: `python -m benches.gpu.engine --help`, from the
repository's root.
"""
