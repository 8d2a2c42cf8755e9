#!/usr/bin/env bash
# Runs the correctness machine (tests/machine) for HOURS hours.
#
# Usage: scripts/model_check.sh VLLM_VERSION HOURS
#
# The machine first runs on all mutants, which it must detect, and then on the unchanged code.
# MODEL_SEED is the first seed. The script prints the number of steps, hits, and hits with multiple
# KV cache groups. It stops at the first failure and prints a minimal example; a run with the same
# seed reproduces the failure.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/env.sh "$1"
PYTEST=(".venv-$1/bin/python" -m pytest -q --timeout 0)
MODEL_MUTANTS=all "${PYTEST[@]}" tests/machine/test_mutants.py
MODEL_HOURS="$2" MODEL_SEED="${MODEL_SEED:-$RANDOM}" exec "${PYTEST[@]}" tests/machine/test_machine.py -k hours -s
