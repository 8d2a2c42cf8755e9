# Everything a person types. `make demo` and `make test` each do all that they need on a fresh machine.
.DEFAULT_GOAL := help
SHELL := /bin/bash
VERSION ?= 0.32.0
PYTHON ?=
MINUTES ?= 65
export PYTHON MINUTES

.PHONY: help demo test test-vllm lint bench soak model-check wheels clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

demo: ## real vLLM on the CPU: a chat served cold, then by new engines from disk and from a server's memory
	@scripts/env.sh 0.32.0 && exec .venv-0.32.0/bin/python examples/chat_demo.py

test: ## all tests: Rust, Python, real vLLM 0.32.0; then the short form on 0.30, 0.31 and 0.33 (starts no new test after MINUTES=65)
	@scripts/suite.sh all

test-vllm: ## the whole Python suite on another vLLM: make test-vllm VERSION=0.31.0
	@scripts/suite.sh full $(VERSION)

lint: ## formatters, clippy, ruff, mypy --strict, stub test, import contracts, house rules, prose, docs site
	@scripts/lint.sh

bench: ## every bench, Rust and Python; ratios are printed with the targets
	@scripts/bench.sh

soak: ## engines, store and faults together for MINUTES (30); tokens, pins, memory, handles and threads are watched
	@MINUTES=$(if $(filter file,$(origin MINUTES)),30,$(MINUTES)) scripts/soak.sh

model-check: ## the correctness machine (tests/machine) for HOURS=1 on VERSION: every mutant, then the product (make test has a short form)
	@scripts/model_check.sh $(VERSION) $(or $(HOURS),1)

wheels: ## manylinux wheels and an sdist in dist/, installed and imported where this machine can run them
	@scripts/wheels.sh

clean: ## remove environments, build outputs and caches of the checkout
	rm -rf .venv-* build target dist .mypy_cache .ruff_cache .hypothesis .import_linter_cache .pytest_cache python/kvloft/_core*.so
	find python tests examples scripts benches -type d -name __pycache__ -prune -exec rm -rf {} +
