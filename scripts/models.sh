#!/usr/bin/env bash
# The hand-made concurrency of the core under a scheduler that tries KV_ORDERS orders of each model (2,000 unless given).
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/models
exec cargo test --quiet --profile tested -p kvloft-core --test models -- --test-threads=1
