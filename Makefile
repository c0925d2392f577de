# Everything starts here. Needs make, Python 3.11 to 3.13 and, the first time, a network.
PYTHON ?= python3
VENV   := $(if $(INFERFLEET_VENV),$(INFERFLEET_VENV),.venv)
BIN    := $(VENV)/bin
ENGINES ?= 2
WORKERS ?= 3
ARGS   ?=

# Tools of the environment (grpcurl, buf) are found by name; bootstrap must not find its python.
PYTEST = PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help run up down check format test test-tools verify kernels mutants chaos gpu bench protos lock venv dev model clean

help: ## Show what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

run: venv ## Start a whole fleet, ask it one question, show where the time went, stop it
	@$(BIN)/inferfleet demo --engines $(ENGINES) $(ARGS)

up: venv ## Start a fleet and keep it until Ctrl-C (ARGS="--engines 1 --port 50051")
	@$(BIN)/inferfleet up --engines $(ENGINES) $(ARGS)

down: venv ## Stop a fleet that was started with --detach
	@$(BIN)/inferfleet down $(ARGS)

check: dev ## Format, lint, types, import walls, protos, generated stubs
	@$(BIN)/python scripts/check.py

format: dev ## Rewrite the code in the one format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# A file's tests stay in one process and share its fleet. Most tests wait more than they compute.
test: dev ## All tests that need nothing but this virtual environment (WORKERS=1 ARGS="-k gateway")
	@$(PYTEST) -m "not tools and not verify and not gpu" -n $(WORKERS) --dist loadfile $(ARGS)

test-tools: dev ## Tests with Node, Chromium, podman, Go …: a missing tool fails by name
	@$(PYTEST) -m tools $(ARGS)

verify: dev ## The long runs: soak, faults, many random histories
	@$(PYTEST) -m 'verify and not whole' --timeout 1800 $(ARGS)

kernels: dev ## All kernels: their tests, and what compiled Triton kernels take beside a table
	@$(PYTEST) tests/kernels -m "not gpu" --timeout 1800 $(ARGS)

mutants: dev ## Faults in a copy of the tree, one by one: do the tests notice them? (ARGS="--only quotas")
	@$(BIN)/python -m tests.mutants $(ARGS)

chaos: dev ## Faults of every part of a fleet under 32 streams (ARGS="--only engine-kill --rounds 20")
	@$(BIN)/python -m tests.chaos $(ARGS)

gpu: dev ## Tests and kernels on a CUDA device
	@TRITON_INTERPRET=0 $(PYTEST) tests/device -m gpu --timeout 600 $(ARGS)

bench: dev ## The engine beside transformers; see benchmarks/README.md (ARGS="--batch 8")
	@$(BIN)/python -m benchmarks.bench_engine $(ARGS)

protos: dev ## Generate the stubs again after a change of protos/
	@$(BIN)/python scripts/gen_protos.py

lock: ## Resolve the dependencies again after a change of pyproject.toml
	@$(PYTHON) scripts/lock.py

venv: python ## Make .venv ready to run the fleet
	@$(PYTHON) scripts/bootstrap.py

model: venv ## Fetch the model (`venv` does it already)

dev: python ## Make .venv ready for checks and tests
	@$(PYTHON) scripts/bootstrap.py --dev

clean: ## Remove the virtual environment, caches and the state of stopped fleets
	rm -rf $(VENV) .inferfleet .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

.PHONY: python
python:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is missing: install Python 3.11, 3.12 or 3.13, or say where it is: make PYTHON=/path/to/python3"; exit 1; }
