#!/usr/bin/env bash
# Runs the tests that cover unsafe code (the core's tests and Python tests of the extension) with
# the address and leak sanitizers. Requires the nightly toolchain; the Python tests also require
# gcc's libasan and an environment created by scripts/env.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH PYTHONHOME
export RUSTFLAGS=-Zsanitizer=address CARGO_TARGET_DIR=target/sanitize KV_FIRE_SECONDS=${KV_FIRE_SECONDS:-20}
TARGET=x86_64-unknown-linux-gnu
PYTHON=${PYTHON:-$PWD/.venv-0.32.0/bin/python}

cargo +nightly test --quiet --locked --target $TARGET -p kvloft-core --lib --test store_threads --test store_faults --test fire -- --skip no_order_of_disk_jobs

PYO3_PYTHON=$PYTHON cargo +nightly build --quiet --locked --target $TARGET -p kvloft-py
rm -rf build/sanitize
mkdir -p build/sanitize
cp -r python/kvloft build/sanitize/kvloft
cp target/sanitize/$TARGET/debug/lib_core.so build/sanitize/kvloft/_core.abi3.so
# Only the Rust tests check for leaks, because the Python interpreter leaks memory on purpose.
LD_PRELOAD=$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/sanitize \
  "$PYTHON" -m pytest -q -p no:cacheprovider --noconftest tests/core/test_key_chain.py tests/core/test_keys.py tests/core/test_tag.py
