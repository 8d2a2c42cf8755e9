#!/usr/bin/env bash
# Runs the core crate's concurrency tests with shuttle, which executes each test under KV_ORDERS
# thread schedules (default 2,000).
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/models
exec cargo test --quiet --profile tested -p kvloft-core --test models -- --test-threads=1
