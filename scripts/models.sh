#!/usr/bin/env bash
# Runs the core's concurrent code under a scheduler that tries KV_ORDERS orders of each model
# (default 2,000).
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/models
exec cargo test --quiet --profile tested -p kvloft-core --test models -- --test-threads=1
