# Everything runs in a virtual environment of its own; constraints.txt pins torch for every install.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL ?=
ARGS ?=

.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

setup: $(STAMP)  ## create the virtual environment and install

serve: $(STAMP)  ## serve MODEL (default: smollm2, fetched once) on http://localhost:8000
	$(BIN)/penstock serve $(MODEL) $(ARGS)

test: $(STAMP)  ## run the whole test suite, on the CPU
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: $(STAMP)  ## lint, formatting, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(STAMP)  ## format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-gpu:  ## kernel and engine checks on a CUDA machine, with the python that has torch
	PYTHONPATH=src $(PYTHON) tests/gpu/all.py $(ARGS)

test-recipes:  ## the recipes' servers on a CUDA machine: whole models with random weights
	PYTHONPATH=src $(PYTHON) tests/gpu/recipes_check.py $(ARGS)

bench:  ## engine speed on a CUDA machine: TPOT, 32 and 256 requests, start-up
	PYTHONPATH=src $(PYTHON) benchmarks/table.py $(ARGS)

docs: $(STAMP)  ## regenerate docs/config.md from the schema
	$(BIN)/python tools/gen_config_docs.py

.PHONY: help setup serve test check fmt test-gpu test-recipes bench docs
