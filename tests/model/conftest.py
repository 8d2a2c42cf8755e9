"""Without vLLM there is nothing for the correctness machine to drive; its tests are not collected then."""

import importlib.util
import os

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
