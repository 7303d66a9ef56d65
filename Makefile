# Everything a checkout needs, from one command each. `make help` lists them.
PYTHON ?= python3.11
VENV := .venv
PIP_FLAGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench clean

help:            ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: $(STAMP)  ## make .venv with pinned dependencies (skipped when up to date)

$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV): minutes, most of them torch"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup      ## the main job: strategies x precisions on CPU, two ranks, under two minutes
	$(BIN)/python -m distbench +recipes=ddp_vs_fsdp

test: setup      ## lint, types and the test suite
	$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/python -m pytest

bench: setup     ## the performance targets, measured on this machine
	$(BIN)/python -m benchmarks

clean:           ## remove the environment and caches; runs in outputs/ stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
