# Development commands. `make demo` and `make test` install everything they need.
.DEFAULT_GOAL := help
SHELL := /bin/bash
VERSION ?= 0.32.0
PYTHON ?=
MINUTES ?= 65
export PYTHON MINUTES

.PHONY: help demo test test-vllm lint bench soak model-check wheels clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

demo: ## run a chat with vLLM on the CPU, and load its KV from host memory, from disk and from a server (DEMO_MODEL=smollm2 selects a trained model)
	@scripts/env.sh 0.32.0 && exec .venv-0.32.0/bin/python examples/chat_demo.py

test: ## run the Rust tests and the Python tests with vLLM 0.32.0, then the short tests with 0.30 and 0.33 (MINUTES=65 limits the time)
	@scripts/suite.sh all

test-vllm: ## run all Python tests with a different vLLM version: make test-vllm VERSION=0.31.0
	@scripts/suite.sh full $(VERSION)

lint: ## run all static checks: formatters, clippy, ruff, mypy --strict, the stub, import contracts, house rules, prose and the docs site
	@scripts/lint.sh

bench: ## run the Rust and Python benchmarks and compare their results with the targets
	@scripts/bench.sh

soak: ## run engines and the store with injected faults for MINUTES=30, and check tokens, pins, memory, file handles and threads
	@MINUTES=$(if $(filter file,$(origin MINUTES)),30,$(MINUTES)) scripts/soak.sh

model-check: ## run the correctness machine on every mutant, then for HOURS=1 on kvloft with vLLM VERSION (make test runs it briefly)
	@scripts/model_check.sh $(VERSION) $(or $(HOURS),1)

wheels: ## build manylinux wheels and an sdist in dist/, then install and import the wheels that this machine can run
	@scripts/wheels.sh

clean: ## remove the checkout's environments, build outputs and caches
	rm -rf .venv-* build target dist .mypy_cache .ruff_cache .hypothesis .import_linter_cache .pytest_cache python/kvloft/_core*.so
	find python tests examples scripts benches -type d -name __pycache__ -prune -exec rm -rf {} +
