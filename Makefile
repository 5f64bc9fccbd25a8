# Two commands on a fresh machine: `make demo` runs the main job, `make test` the tests. Both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
DEMO := data/demo
MEASUREMENTS ?= 500000
STEPS ?= 1000

.PHONY: help setup demo test test-slow lint bench lock clean

help:
	@echo "make setup      create .venv from requirements.lock"
	@echo "make demo       simulate an Internet, prepare probe rows, train a small model, compare it"
	@echo "make test       linters, type checker and tests"
	@echo "make test-slow  the tests that take longer: runs that are killed, several processes, real data at length"
	@echo "make bench      the figures of docs/benchmarks.md"
	@echo "make lock       resolve requirements.lock again, for all supported Pythons found"

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV) (about a minute the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh scripts/demo.sh $(DEMO) $(MEASUREMENTS) $(STEPS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy

test: lint
	@$(BIN)/python -m pytest

test-slow: setup
	@$(BIN)/python -m pytest -m slow

bench: setup
	@$(BIN)/ping-llm bench prepare --measurements 20000000
	@$(BIN)/ping-llm bench pipeline --workers 2
	@$(BIN)/ping-llm bench pipeline --rows big

lock:
	@$(PYTHON) scripts/lock.py

clean:
	rm -rf $(VENV) data/demo
