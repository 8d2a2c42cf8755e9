"""Whole-engine GPU benchmarks.

Run them from the repository root, for example `python -m benches.gpu.engine --help`.
"""
