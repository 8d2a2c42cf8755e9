"""The zoo runs where KV_ZOO is set: `make test` has no use for it until kvloft serves several KV cache groups."""

import os

if not os.environ.get("KV_ZOO"):
    collect_ignore_glob = ["test_*.py"]
