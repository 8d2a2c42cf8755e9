#!/usr/bin/env bash
# Runs all static checks and prints one line per check. If a check fails, prints the check's output
# and continues.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
unset PYTHONPATH PYTHONHOME
scripts/env.sh lint </dev/null || exit 1
PATH="$PWD/.venv-lint/bin:$PATH"
OUT=$(mktemp)
trap 'rm -f "$OUT"' EXIT
FAILED=0

check() {
  local name=$1
  shift
  if "$@" >"$OUT" 2>&1 </dev/null; then
    printf 'ok      %s\n' "$name"
  else
    printf 'FAILED  %s\n' "$name"
    sed 's/^/        /' "$OUT"
    FAILED=1
  fi
}

check "rustfmt" cargo fmt --all --check
check "clippy" cargo clippy --quiet --locked --workspace --all-targets --all-features -- -D warnings
check "shuttle models" env RUSTFLAGS="--cfg shuttle" cargo clippy --quiet --locked -p kvloft-core --test models --target-dir target/models -- -D warnings
check "fuzz targets" cargo clippy --quiet --locked --no-default-features --manifest-path rust/fuzz/Cargo.toml --target-dir target/fuzz -- -D warnings
check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "mypy --strict" mypy
check "stub of _core against the built extension" python -m mypy.stubtest kvloft._core --mypy-config-file scripts/stubtest.ini --allowlist scripts/stubtest.allow
check "import contracts" env PYTHONPATH=python lint-imports
check "house rules" python scripts/house_rules.py
check "prose" python scripts/prose.py
check "docs site" env NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet --site-dir build/site
check "wheel: metadata" twine check --strict build/wheel/*.whl
check "wheel: contents" check-wheel-contents build/wheel
check "workflows: schema" check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
check "dependabot: schema" check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
check "container image" hadolint examples/deploy/Dockerfile
check "workflows: actionlint" actionlint .github/workflows/*.yml
if command -v promtool >/dev/null; then
  check "Prometheus configuration and alert rules" promtool check config examples/deploy/prometheus.yaml
else
  echo "skipped Prometheus configuration and alert rules: promtool is not installed (apt-get install prometheus)"
fi
exit $FAILED
