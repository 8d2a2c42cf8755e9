"""Runs a bounded form of the correctness machine if vLLM is installed; `make model-check` runs all
of it.

The tests run only if they are selected by name: they import vLLM's whole scheduler, and other tests
would inherit its logging and environment. The import below must precede any other import of vLLM,
because some releases fail otherwise.
"""

import importlib.util
import os
import sys

if importlib.util.find_spec("vllm") is None or not any(
    "tests/machine" in word for word in sys.argv
):
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm.config  # noqa: F401
