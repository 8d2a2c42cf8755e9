#!/usr/bin/env bash
# The long form of the correctness machine: scripts/model_check.sh VLLM_VERSION HOURS. MODEL_SEED is
# the first seed. All mutants first (a machine that misses one proves nothing), then the product as
# it is. It prints steps, hits and hits with several groups so far, and ends with the first failure,
# shrunk; a test of the same seed in tests/machine repeats it.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/env.sh "$1"
PYTEST=(".venv-$1/bin/python" -m pytest -q --timeout 0)
MODEL_MUTANTS=all "${PYTEST[@]}" tests/machine/test_mutants.py
MODEL_HOURS="$2" MODEL_SEED="${MODEL_SEED:-$RANDOM}" exec "${PYTEST[@]}" tests/machine/test_machine.py -k hours -s
