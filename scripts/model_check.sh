#!/usr/bin/env bash
# Runs the state machine tests of tests/machine for hours: scripts/model_check.sh VLLM_VERSION HOURS
#
# First runs the tests on all mutants, which they must detect, then on the unchanged product.
# MODEL_SEED is the first seed. Prints the numbers of steps, hits and hits with multiple KV cache
# groups. Stops at the first failure and prints it in shrunk form; a run with the same seed
# reproduces it.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/env.sh "$1"
PYTEST=(".venv-$1/bin/python" -m pytest -q --timeout 0)
MODEL_MUTANTS=all "${PYTEST[@]}" tests/machine/test_mutants.py
MODEL_HOURS="$2" MODEL_SEED="${MODEL_SEED:-$RANDOM}" exec "${PYTEST[@]}" tests/machine/test_machine.py -k hours -s
