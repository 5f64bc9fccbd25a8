# Two commands on a fresh machine: `make demo` runs the main job, `make test` the tests. Both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VENV_MAXTEXT := .venv-maxtext
VENV_TORCH := .venv-torch
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
DEMO := data/demo
MEASUREMENTS ?= 300000
STEPS ?= 2000
# A file's tests stay together: they share fixtures that take long to make.
PARALLEL := --numprocesses auto --maxprocesses 8 --dist loadfile

.PHONY: help setup demo test test-slow test-faults test-random test-torch test-maxtext test-tensorflow lint dist architecture config-page bench lock clean

help:
	@echo "make setup      create .venv from requirements.lock"
	@echo "make demo       simulate an Internet, prepare probe rows, train a small model, compare it"
	@echo "make test       linters, type checker, import contract and tests"
	@echo "make test-slow  the tests that take longer: runs that are killed, several processes, real data at length"
	@echo "make test-faults  kill, fill the disk, flip bits and start twice, and compare with the undisturbed result"
	@echo "make test-random  the property tests with fresh random examples"
	@echo "make test-maxtext  the tests of the MaxText integration, in an environment of their own (Python 3.12 or 3.13)"
	@echo "make test-tensorflow  the tests of the backends that need TensorFlow, in the same environment"
	@echo "make test-torch  PyTorch's own loader over our batches, in an environment with PyTorch"
	@echo "make dist       build a wheel and an sdist into dist/"
	@echo "make architecture  renew the picture and the tables of docs/architecture.md"
	@echo "make config-page  renew the tables of keys in docs/configuration.md"
	@echo "make bench      the figures of docs/benchmarks.md"
	@echo "make lock       resolve the lock files again, for all supported Pythons"

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV) (about two minutes the first time)"
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
	@report=$$($(BIN)/lint-imports --no-cache) || { echo "$$report"; exit 1; }

test: lint
	@$(BIN)/python -m pytest $(PARALLEL)

test-slow: setup
	@$(BIN)/python -m pytest $(PARALLEL) -m slow

# Each process makes what its trials begin with, once.
test-faults: setup
	@$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 tests/faults

test-random: setup
	@HYPOTHESIS_PROFILE=random $(BIN)/python -m pytest $(PARALLEL) $$(grep -lE "^from hypothesis" tests/test_*.py)

# PyTorch is large, and nothing else needs it: it has an environment of its own, on top of the other one.
test-torch: $(VENV_TORCH)/.ready
	@$(VENV_TORCH)/bin/python -m pytest tests/pytorch

$(VENV_TORCH)/.ready: requirements-torch.lock $(VENV)/.ready
	@echo "Setting up $(VENV_TORCH)"
	@$(BIN)/python -m venv $(VENV_TORCH)
	@$(BIN)/python -c 'import site, sys; print(*site.getsitepackages())' > $$(ls -d $(VENV_TORCH)/lib/python*/site-packages)/base.pth
	@echo $(CURDIR)/src >> $$(ls -d $(VENV_TORCH)/lib/python*/site-packages)/base.pth
	@$(VENV_TORCH)/bin/python -m pip --quiet --disable-pip-version-check install -r requirements-torch.lock
	@touch $@

# Some tests start four processes of MaxText: not more than two of them at a time.
test-maxtext:
	@if python=$$($(PYTHON) scripts/find_python.py 3.12 3.13); then \
		$(MAKE) --no-print-directory MAXTEXT_PYTHON="$$python" $(VENV_MAXTEXT)/.ready && \
		$(VENV_MAXTEXT)/bin/python -m pytest --numprocesses auto --maxprocesses 2 --dist loadfile tests/maxtext; \
	else \
		echo "test-maxtext is skipped: MaxText needs Python 3.12 or 3.13, and neither python3.12, python3.13 nor pyenv has one"; \
	fi

# TensorFlow is in the environment of MaxText: its lock file pins both.
test-tensorflow:
	@if python=$$($(PYTHON) scripts/find_python.py 3.12 3.13); then \
		$(MAKE) --no-print-directory MAXTEXT_PYTHON="$$python" $(VENV_MAXTEXT)/.ready && \
		$(VENV_MAXTEXT)/bin/python -m pytest tests/tfds; \
	else \
		echo "test-tensorflow is skipped: its environment needs Python 3.12 or 3.13, and neither python3.12, python3.13 nor pyenv has one"; \
	fi

$(VENV_MAXTEXT)/.ready: requirements-maxtext.lock pyproject.toml
	@echo "Setting up $(VENV_MAXTEXT) (about two minutes the first time)"
	@$(MAXTEXT_PYTHON) -m venv $(VENV_MAXTEXT)
	@$(VENV_MAXTEXT)/bin/python -m pip --quiet --disable-pip-version-check install -r requirements-maxtext.lock
	@$(VENV_MAXTEXT)/bin/python -m pip --quiet --disable-pip-version-check install --no-deps --no-build-isolation --editable .
	@touch $@

bench: setup
	@$(BIN)/python bench/prepare_speed.py --measurements 20000000
	@$(BIN)/python bench/pipeline_speed.py --workers 2
	@$(BIN)/python bench/pipeline_speed.py --rows big

dist: setup
	@rm -rf dist
	@$(BIN)/python -m hatchling build

config-page: setup
	@$(BIN)/python scripts/config_page.py

architecture: setup
	@$(BIN)/python scripts/architecture.py docs/architecture.md 2> /dev/null

lock:
	@$(PYTHON) scripts/lock.py

clean:
	rm -rf $(VENV) $(VENV_MAXTEXT) $(VENV_TORCH) data/demo
