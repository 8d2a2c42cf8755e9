#!/usr/bin/env bash
# Runs all benchmarks: first the Rust benchmarks with cargo, then the Python benchmarks in the
# environment with vLLM 0.32.0.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH PYTHONHOME
scripts/env.sh 0.32.0
cargo bench --quiet --locked
for bench in benches/*.py; do
  [ -e "$bench" ] || continue
  printf '\n== %s\n' "$bench"
  .venv-0.32.0/bin/python "$bench"
done
