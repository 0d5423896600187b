# Everything a fresh clone needs: `make demo` and `make test` do the set-up themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_DIR ?= runs/demo
ARGS ?=
# of the tests: one process per core, each of which uses one
WORKERS ?= 2

# stamps: each set-up step runs again only when what it reads has changed
CREATED := $(VENV)/.created
PACKAGES := $(VENV)/.packages
INSTALLED := $(VENV)/.installed
COMPILED_FROM := $(shell find csrc -type f 2>/dev/null)

BENCHMARKS := $(patsubst bench/speed/%.py,%,$(wildcard bench/speed/[a-z]*.py))

.DEFAULT_GOAL := help
.PHONY: help setup test lint demo demo-quick bench docs clean

help:
	@echo 'make setup       virtual environment in $(VENV), pinned packages, compiled parts'
	@echo 'make test        set-up, then all tests (ARGS="tests/ops -x")'
	@echo 'make lint        set-up, then ruff and mypy'
	@echo 'make demo        set-up, then grow and train small models here (ARGS="--seed 1")'
	@echo 'make demo-quick  the same path in a few minutes'
	@echo 'make bench       set-up, then the microbenchmarks (NAME=expand ARGS="--repeats 3")'
	@echo 'make docs        set-up, then the documentation as a site in build/site'
	@echo 'make clean       remove build outputs and caches, keep $(VENV) and runs'

setup: $(INSTALLED)

$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo 'growkern needs Python 3.10 to 3.13: make setup PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo 'Python has no venv module here: sudo apt-get install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(PACKAGES): requirements-dev.txt $(CREATED)
	@echo 'fetching PyTorch and all else into $(VENV), up to 7 GB: pip says nothing for minutes'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

# no build isolation and no dependencies: nothing is fetched here, so it also works offline
$(INSTALLED): pyproject.toml CMakeLists.txt $(COMPILED_FROM) $(PACKAGES)
	@echo 'compiling, about a minute'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-build-isolation --no-deps --editable .
	@touch $@

test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  --max-worker-restart 0 $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: setup
	$(BIN)/python -m examples.demo.demo --dir $(DEMO_DIR) $(ARGS)

demo-quick: setup
	$(BIN)/python -m examples.demo.demo --dir $(DEMO_DIR)-quick --quick $(ARGS)

bench: setup
	set -e; for name in $(or $(NAME),$(BENCHMARKS)); do $(BIN)/python -m bench.speed.$$name $(ARGS); done

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean:
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find growkern testbed tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f $(INSTALLED)
