#!/usr/bin/env bash
# Runs a soak test: make soak MINUTES=n (default 30). Two engines run on failing disks while a
# store-only test runs on faulty files. Results are written to build/soak/.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
unset PYTHONPATH PYTHONHOME
MINUTES=${MINUTES:-30}
scripts/env.sh 0.32.0 || exit 1
mkdir -p build/soak
cargo build --quiet --release --locked -p kvloft-core --test fire || exit 1
KV_FIRE_SECONDS=$((MINUTES * 60)) cargo test --quiet --release --locked -p kvloft-core --test fire >build/soak/store.log 2>&1 </dev/null &
store=$!
.venv-0.32.0/bin/python -m tests.e2e.soak --minutes "$MINUTES" --json build/soak/engines.json
engines=$?
wait $store
store=$?
tail -n 12 build/soak/store.log
[ $engines = 0 ] && [ $store = 0 ] && echo "soak test of $MINUTES minutes: passed" && exit 0
echo "soak test of $MINUTES minutes: FAILED (exit status: engines $engines, store $store); see build/soak/"
exit 1
