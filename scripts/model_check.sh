#!/usr/bin/env bash
# The long form of the correctness machine: scripts/model_check.sh VLLM_VERSION HOURS. MODEL_SEED says where it begins.
# It ends with the first failure, shrunk; a test of the same seed in tests/model repeats it.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/env.sh "$1"
MODEL_HOURS="$2" MODEL_SEED="${MODEL_SEED:-$RANDOM}" exec ".venv-$1/bin/python" -m pytest tests/model/test_machine.py -k hours -s -q --timeout 0
