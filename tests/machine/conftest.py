"""Runs a short form of the correctness machine if vLLM is installed; `make model-check` runs the
full form.

The tests run only if they are selected by name, because they import vLLM's scheduler, which changes
logging and the environment for other tests. The import below must precede any other import of vLLM,
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
