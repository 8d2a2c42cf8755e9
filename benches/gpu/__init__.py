"""What is measured on a GPU with whole engines: `python -m benches.gpu.engine --help`, from the
repository's root.
"""
