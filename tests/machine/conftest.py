"""The correctness machine, bounded, wherever vLLM is; all of it with `make model-check`.

Only where pytest is asked for it by name: it brings the whole of vLLM's scheduler into its process,
whose log and environment other tests would inherit. Its tests import that before anything else of
vLLM, which some releases do not bear: hence the import.
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
