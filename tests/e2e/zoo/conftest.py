"""Runs test_zoo.py and test_faults.py only if the folder or the file is selected, or with
KV_ZOO=all. test_checks.py, which runs `kvloft check`, always runs.
"""

import os
import sys

if not os.environ.get("KV_ZOO") and not any("e2e/zoo" in word for word in sys.argv):
    collect_ignore_glob = ["test_zoo.py", "test_faults.py"]
