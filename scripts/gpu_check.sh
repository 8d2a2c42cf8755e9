#!/usr/bin/env bash
# Runs all tests and benches that require a GPU: scripts/gpu_check.sh [STAGE...] (default: all stages).
#
# Stages without vLLM:
#   tests      tests of the kernels and the mover
#   copy       `kvloft bench copy`
#   sanitize   compute-sanitizer on a selection of the tests
#   profile    ncu on the kernels
# Stages with vLLM:
#   startup    saves while host memory is being registered
#   engine     time to first token and decode steps, compared with plain vLLM and OffloadingConnector
#   prefill    cold prompts, in multiple runs, and in one process with and without the connector
#   kv1        the engine bench with one KV head
#   chats      a closed loop of chats; includes PegaFlow and LMCache if they are installed
#   crowd      preemptions, compared with plain vLLM
#   equality   tokens and pages, compared with plain vLLM
#   groups     equality for Gemma 3 and 4 with kv_groups=all
#   states     equality for a small Qwen 3.5, with and without MTP (100 to 300 s each, because Triton compiles kernels)
#   known      TTFT of cached prompts for models with multiple KV cache groups or draft models
#   served     two engines with one server
#   restart    an engine that is killed and restarted
#   peers      the servers of kvloft, LMCache and PegaFlow: TTFT and chats
#   ranks      tensor and pipeline parallel engines (two GPUs)
#
# Requires an environment with torch for CUDA, cuda-core, cuda-bindings, NVRTC, numpy, rich, PyYAML, pytest and hypothesis, where kvloft
# can be imported (PYTHONPATH=python). `sanitize` requires compute-sanitizer, and `profile` requires ncu. Stages with vLLM require vLLM 0.26
# or newer and kvloft's extension; for an unpacked vLLM, set PYTHONPATH=DIR/site (peers: PYTHONPATH=DIR/site2:DIR/site).
#
# ENGINE_ARGS, CHATS_ARGS and EQUALITY_ARGS are passed to the benches, for example --timeout 500 if commands have a time limit. Logs and
# results are written to $OUT (default build/gpu); earlier results are kept. Fails if a stage fails or no GPU test ran.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-build/gpu}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 NEED_GPU=1
ALL="tests copy startup engine chats crowd prefill sanitize profile kv1 equality groups states known served restart peers ranks"
stages=${*:-$ALL}
failed=()
for name in $stages; do
  [[ " $ALL " == *" $name "* ]] || { echo "unknown stage $name; use any of: $ALL" >&2 && exit 2; }
done

say() { printf '\n=== [%4ds] %s\n' "$SECONDS" "$*"; }
has() { [[ " $stages " == *" $1 "* ]]; }
stage() {
  local name=$1
  shift
  say "$name: $*"
  "$@" >"$OUT/$name.log" 2>&1 || failed+=("$name")
  tail -n "${TAIL:-12}" "$OUT/$name.log"
}
pytest() { "$PYTHON" -m pytest -q -p no:cacheprovider -o addopts="--import-mode=importlib" tests/gpu -m gpu "$@"; }

sanitize() {
  local tool=$1
  shift
  # Run only a few small cases per kernel, because the tools slow programs down by a factor of 100.
  local cases="(bitwise and (odd_mix or per_layer_8 or mla) and 3) or partial or ranks or faults or trailers or submitters_send"
  cases+=" or (e348 and ((content and (outliers or random)) or (width and (6k or mixed) and 0.6) or saved_raw or damage))"
  KV_NUM_FAULTS=100 compute-sanitizer --tool "$tool" "$@" --error-exitcode 9 --target-processes all \
    "$PYTHON" -m pytest -q -x -p no:cacheprovider -o addopts="--import-mode=importlib" -o timeout=0 tests/gpu -m gpu \
    -k "$cases"
}

if has tests; then
  stage tests pytest -rA --tb=short
  grep -Eq '^[0-9]+ passed' "$OUT/tests.log" || grep -Eq ' passed' "$OUT/tests.log" || failed+=("tests: none ran")
fi
has copy && TAIL=60 stage copy "$PYTHON" -m kvloft.cli bench copy --json "$OUT/copy.json" --plot "$OUT/copy.png"
# Saves must not fail while 60 GiB of host memory is being registered.
has startup && stage startup "$PYTHON" -m benches.gpu.engine --connectors kvloft --phases startup --host-gib "${STARTUP_GIB:-60}" --timeout 240 \
  --json "$OUT/engine_startup.json" --logs "$OUT/startup"
has engine && TAIL=60 stage engine "$PYTHON" -m benches.gpu.engine --json "$OUT/engine.json" --logs "$OUT" ${ENGINE_ARGS:-}
has chats && TAIL=30 stage chats "$PYTHON" -m benches.gpu.chats --json "$OUT/chats.json" --logs "$OUT/chats" ${CHATS_ARGS:-}
has crowd && TAIL=30 stage crowd "$PYTHON" -m benches.gpu.equality --setups reference,plain-pc,hnd --phases crowd --timeout 400 \
  --json "$OUT/equality_crowd.json" --logs "$OUT/crowd"
if has prefill; then # run multiple times in new processes, because runs differ by as much as the target allows
  rm -f "$OUT"/engine_again_*.json # otherwise, the report would include an earlier run's results
  for number in $(seq "${PREFILL_RUNS:-3}"); do
    TAIL=30 stage "engine_again_$number" "$PYTHON" -m benches.gpu.engine --connectors none,kvloft --phases cold,wave \
      --json "$OUT/engine_again_$number.json" --logs "$OUT/again_$number"
  done
  # Compare runs with and without the connector in one process, so that everything else is equal.
  TAIL=30 stage engine_attached "$PYTHON" -m benches.gpu.engine --connectors kvloft --phases attached \
    --json "$OUT/engine_attached.json" --logs "$OUT/attached"
fi
if has sanitize; then
  # --report-api-errors no: bindings newer than the driver probe for missing symbols, which would be reported as API errors. kvloft checks
  # the errors of its own calls.
  stage memcheck sanitize memcheck --leak-check no --report-api-errors no
  stage racecheck sanitize racecheck
  stage synccheck sanitize synccheck
  stage initcheck sanitize initcheck
fi
if has profile; then
  # Profile gathers and scatters of 4 KiB pages, the hardest case, then kill the bench. Clocks are
  # not locked, because other users may share the GPU.
  say "profile"
  ncu --clock-control none --kill on -k 'regex:(gather|scatter)' --launch-skip 4 --launch-count 6 --section SpeedOfLight --section Occupancy \
    --section WarpStateStats --section MemoryWorkloadAnalysis "$PYTHON" -m kvloft.cli bench copy --mib 256 >"$OUT/ncu.txt" 2>&1
  grep -c 'Duration' "$OUT/ncu.txt" || failed+=("profile: no kernel was profiled")
fi
has kv1 && stage engine_kv1 "$PYTHON" -m benches.gpu.engine --connectors native,kvloft --phases ttft --kv-heads 1 --host-gib 12 \
  --json "$OUT/engine_kv1.json" --logs "$OUT/kv1"
has equality && TAIL=90 stage equality "$PYTHON" -m benches.gpu.equality --json "$OUT/equality.json" --logs "$OUT" ${EQUALITY_ARGS:-}

if has groups; then # 13 layers form six sliding-window groups (one of them smaller) and one full attention group
  for phase in prompts crowd; do
    TAIL=30 stage "equality_groups_$phase" "$PYTHON" -m benches.gpu.equality --model gemma3 --layers 13 --blocks 1300 --timeout 200 \
      --setups reference,plain-pc,groups --phases $phase --json "$OUT/equality_groups_$phase.json" --logs "$OUT/groups_$phase"
  done
  TAIL=30 stage equality_gemma4 "$PYTHON" -m benches.gpu.equality --model gemma4 --blocks 2000 --timeout 200 \
    --setups reference,plain-pc,groups --phases prompts,crowd --json "$OUT/equality_gemma4.json" --logs "$OUT/gemma4"
fi

if has states; then # the model has gated delta net groups and a full attention group with two layers each; Triton first compiles for minutes
  for model in tiny-gdn tiny-gdn-mtp; do
    TAIL=30 stage "equality_$model" "$PYTHON" -m benches.gpu.equality --model $model --blocks 900 --host-gib 2 \
      --timeout "${STATES_S:-400}" --setups plain-flash,flash-groups --phases kept,crowd --json "$OUT/equality_$model.json" \
      --logs "$OUT/$model"
  done
fi

if has known; then
  for model in gemma3 gemma4 qwen35 eagle; do
    stage "known_$model" "$PYTHON" -m benches.gpu.engine --model $model --connectors none,groups --phases ttft,cold --blocks 4700 --host-gib 24 \
      --timeout 300 --json "$OUT/engine_known_$model.json" --logs "$OUT/known_$model"
  done
fi

has served && TAIL=30 stage engine_served "$PYTHON" -m benches.gpu.engine --layers 16 --connectors kvloft,served,served2 \
  --phases ttft,cold,shared --blocks 4700 --host-gib 20 --timeout 300 --json "$OUT/engine_served.json" --logs "$OUT/served"
has restart && TAIL=30 stage restart "$PYTHON" -m benches.gpu.restart --layers 8 --blocks 2700 --host-gib 12 --timeout 200 \
  --json "$OUT/restart.json" --logs "$OUT/restart"
if has peers; then # host memory holds more than one round of prompts; servers register it at startup, which takes one second per GiB
  TAIL=30 stage engine_peers "$PYTHON" -m benches.gpu.engine --layers 16 --connectors served,pegaflow,lmcache-server --phases ttft \
    --blocks 4700 --host-gib 16 --timeout 300 --json "$OUT/engine_peers.json" --logs "$OUT/peers"
  TAIL=30 stage chats_peers "$PYTHON" -m benches.gpu.chats --layers 16 --connectors served,pegaflow,lmcache-server --host-gib 32 \
    --repeats 2 --timeout 500 --json "$OUT/chats_peers.json" --logs "$OUT/peers"
fi
if has ranks; then
  # With 13 layers of Gemma 3, the second pipeline stage has no layers of one of the groups. With 7
  # layers, the first stage has no full-attention layer.
  for ranks in "--tp 2 --layers 8" "--pp 2 --layers 8" "--pp 2 --model gemma3 --layers 13" "--pp 2 --model gemma3 --layers 7"; do
    name=ranks${ranks// /} # shellcheck disable=SC2086 # word splitting is intended
    stage "$name" "$PYTHON" -m benches.gpu.ranks $ranks --timeout 200 --json "$OUT/$name.json" --logs "$OUT/$name"
  done
fi

if ls "$OUT"/*.json >/dev/null 2>&1; then
  "$PYTHON" scripts/gpu_report.py "$OUT" >"$OUT/README.md" || failed+=("report")
  say "report in $OUT/README.md"
fi
say "done"
if ((${#failed[@]})); then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "all stages passed: $stages"
