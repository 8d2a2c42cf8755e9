"""The correctness machine, bounded, wherever vLLM is; all of it with `make model-check`.

Its tests import vLLM's scheduler before anything else of vLLM, which some releases do not bear: hence the import here.
"""

import importlib.util
import os

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm.config  # noqa: F401
