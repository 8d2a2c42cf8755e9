#!/usr/bin/env bash
# Runs the fuzz targets in rust/fuzz in sequence: scripts/fuzz.sh [SECONDS [TARGET...]]
# SECONDS is the time per target (default 60). Requires the nightly toolchain, a C++ compiler and
# cargo-fuzz (cargo install cargo-fuzz --locked). Crashing inputs are written to rust/fuzz/artifacts,
# and all other inputs to rust/fuzz/corpus.
set -euo pipefail
cd "$(dirname "$0")/../rust/fuzz"
seconds=${1:-60}
targets=("${@:2}")
[ ${#targets[@]} != 0 ] || mapfile -t targets < <(cargo fuzz list --fuzz-dir .)
for target in "${targets[@]}"; do
  printf '== %s, %s s\n' "$target" "$seconds"
  leaks=1
  [ "$target" != connection ] || leaks=0 # LeakSanitizer would report exiting threads as leaks
  cargo +nightly fuzz run --fuzz-dir . --target-dir ../../target/fuzz "$target" -- \
    -max_total_time="$seconds" -detect_leaks=$leaks -len_control=0 -print_final_stats=1 # start with long inputs, because some targets are slow
done
