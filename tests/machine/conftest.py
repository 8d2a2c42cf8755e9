"""The correctness machine runs with `make model-check` (which sets MODEL_CHECK), and where vLLM is; not in `make test` yet.

Its tests import vLLM's scheduler before anything else of vLLM, which some releases do not bear: hence the import here.
"""

import importlib.util
import os

if importlib.util.find_spec("vllm") is None or not os.environ.get("MODEL_CHECK"):
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm.config  # noqa: F401
