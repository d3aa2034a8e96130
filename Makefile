# The two commands: `make demo PROMPT="..."` and `make test`. Both set up what they need.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PROMPT ?= Why is the sky blue? Answer in two sentences.
DEMO   ?=
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint format stubs bench clean

demo: $(VENV)/.runtime
	@$(BIN)/gelo demo "$$PROMPT" $(DEMO)

test: $(VENV)/.dev
	@scripts/system_packages.sh
	@scripts/run_tests.sh $(BIN)/python

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

stubs: $(VENV)/.dev
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python scripts/generate_stubs.py

bench: $(VENV)/.dev
	$(BIN)/python -m bench.e2e

clean:
	rm -rf $(VENV)

export PROMPT

$(VENV)/bin/python:
	@$(PYTHON) -m venv $(VENV) || { echo "Python's venv module is missing: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }

$(VENV)/.runtime: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing the packages the services need (once)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing the packages the tests need (once)"
	@$(PIP) --editable ".[dev]"
	@touch $(VENV)/.runtime $@
