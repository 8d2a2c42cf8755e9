#!/usr/bin/env bash
# Builds the release files in dist/: scripts/wheels.sh [x86_64] [aarch64] (default: both)
#
# The script builds an sdist and manylinux wheels for glibc 2.28, and checks their metadata. It then
# installs each file that works on this machine in a new environment, and imports kvloft.
#
# Requires Python, Rust and the other architecture's Rust target (`rustup target add`). If a target
# is missing, its wheel is skipped, and the exit status is 1 unless ALLOW_MISSING=1. maturin and zig
# (the linker) are installed from PyPI. The script prints at least one line every 15 s.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
ARCHES=${*:-x86_64 aarch64}
TOOLS=.venv-wheels
missing=()
ticker=

# say STEP: prints the step's name, and a progress line every 15 s until the next step.
say() {
  stop_ticker
  printf '[%4ds] %s\n' "$SECONDS" "$*"
  (while sleep 15 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do printf '[%4ds]   still running: %s\n' "$SECONDS" "$*"; done) &
  ticker=$!
  disown "$ticker" # keeps bash from reporting that the job was killed
}
stop_ticker() { [ -z "$ticker" ] || kill "$ticker" 2>/dev/null || true; }
trap stop_ticker EXIT
has_target() { [ -d "$(rustc --print target-libdir --target "$1-unknown-linux-gnu" 2>/dev/null)" ]; }

[ -x "$TOOLS/bin/maturin" ] && "$TOOLS/bin/python" -c 'import ziglang, twine' 2>/dev/null || {
  say "installing maturin and zig into $TOOLS"
  "${PYTHON:-python3}" -m venv "$TOOLS"
  "$TOOLS/bin/python" -m pip install --quiet --disable-pip-version-check 'maturin[zig]>=1.9.4,<2' 'twine>=6' 'check-wheel-contents>=0.6'
}
PATH="$PWD/$TOOLS/bin:$PATH"
rm -rf dist
REVISION=rust/py/REVISION # git revision for the sdist; see rust/py/build.rs
trap 'stop_ticker; rm -f "$REVISION"' EXIT
git rev-parse --short=12 HEAD >"$REVISION" 2>/dev/null || echo unknown >"$REVISION"

say "sdist"
maturin sdist --out dist
for arch in $ARCHES; do
  if ! has_target "$arch"; then
    say "skipping the wheel for $arch: the Rust target is not installed (rustup target add $arch-unknown-linux-gnu)"
    missing+=("$arch")
    continue
  fi
  say "wheel for $arch"
  maturin build --release --locked --strip --zig --compatibility manylinux_2_28 --target "$arch-unknown-linux-gnu" --out dist
done

# installed FILE: installs FILE in a new environment and imports kvloft without vLLM or torch.
installed() {
  local venv
  venv=$(mktemp -d)
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$1"
  "$venv/bin/kvloft" --version
  "$venv/bin/python" -c 'import kvloft, kvloft.plan, kvloft.config.sources; from kvloft import _core; print(kvloft.__version__, _core.Session.__name__)'
  "$venv/bin/kvloft" config >/dev/null
  rm -rf "$venv"
}
say "checking metadata and contents"
twine check --strict dist/*
for wheel in dist/*.whl; do [ ! -e "$wheel" ] || check-wheel-contents "$wheel"; done
for wheel in dist/*"$(uname -m)".whl; do
  [ -e "$wheel" ] || continue
  say "installing and importing $wheel"
  installed "$wheel"
done
say "installing and importing the sdist"
installed dist/*.tar.gz
ls -l dist
if ((${#missing[@]})) && [ "${ALLOW_MISSING:-}" != 1 ]; then
  say "skipped architectures: ${missing[*]}"
  exit 1
fi
