#!/usr/bin/env bash
# Runs the concurrency tests of the core with shuttle, which executes each test with KV_ORDERS
# thread schedules (default 2,000).
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/models
exec cargo test --quiet --profile tested -p kvloft-core --test models -- --test-threads=1
