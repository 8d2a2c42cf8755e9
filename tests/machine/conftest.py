"""The correctness machine in bounded form, if vLLM is installed; `make model-check` runs all of it.

Runs only if it is selected by name: it imports vLLM's whole scheduler, whose log and environment
other tests would inherit. The import below must come before any other part of vLLM, because some
releases fail otherwise.
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
