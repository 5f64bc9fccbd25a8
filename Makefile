# Two commands on a fresh machine: `make demo` runs the main job, `make test` the tests. Both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VENV_MAXTEXT := .venv-maxtext
VENV_TORCH := .venv-torch
# Most modules of an environment are never imported: compiling all 19,000 files to bytecode takes 45 s of CPU.
INSTALL := -m pip --quiet --disable-pip-version-check install --no-compile
MAKE_2 := $(MAKE) --no-print-directory --jobs=2
DEMO := data/demo
MEASUREMENTS ?= 300000
STEPS ?= 2000
# A file's tests stay together: they share fixtures that take long to make. tests/conftest.py says which begin.
# A process that crashes ends the run: with another in its stead, xdist would wait forever at the end.
PARALLEL := --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: help setup setup-torch setup-maxtext demo lint types style kernels test test-slow test-faults test-random test-torch test-maxtext test-tensorflow dist architecture config-page bench lock clean

help:
	@echo "make setup      create .venv from requirements.lock"
	@echo "make demo       simulate an Internet, prepare probe rows, train a small model, compare it"
	@echo "make test       linters, type checker, import contract and tests"
	@echo "make  these and the slower ones in one run, as in .ci/run"
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
	@$(BIN)/python $(INSTALL) -r requirements.lock
	@$(BIN)/python $(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh scripts/demo.sh $(DEMO) $(MEASUREMENTS) $(STEPS)

lint: setup
	@$(MAKE_2) types style

types style kernels: setup

types:
	@$(BIN)/mypy

style:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@report=$$($(BIN)/lint-imports --no-cache) || { echo "$$report"; exit 1; }

# Once, beside the type checker: otherwise each process of the tests compiles them.
kernels:
	@$(BIN)/python -c 'import ping_llm.batches.packing, ping_llm.contexts.segments'

test: setup
	@$(MAKE_2) types style kernels
	@$(BIN)/python -m pytest $(PARALLEL)

test-slow: setup
	@$(BIN)/python -m pytest $(PARALLEL) -m slow

# Each process makes what its trials begin with, once.
test-faults: setup
	@$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 tests/faults

test-random: setup
	@HYPOTHESIS_PROFILE=random $(BIN)/python -m pytest $(PARALLEL) $$(grep -lE "^from hypothesis" tests/test_*.py)

# PyTorch is large, and nothing else needs it: it has an environment of its own, on top of the other one.
setup-torch: $(VENV_TORCH)/.ready

test-torch: setup-torch
	@$(VENV_TORCH)/bin/python -m pytest tests/pytorch

$(VENV_TORCH)/.ready: requirements-torch.lock $(VENV)/.ready
	@echo "Setting up $(VENV_TORCH)"
	@$(BIN)/python -m venv $(VENV_TORCH)
	@$(BIN)/python -c 'import site, sys; print(*site.getsitepackages())' > $$(ls -d $(VENV_TORCH)/lib/python*/site-packages)/base.pth
	@echo $(CURDIR)/src >> $$(ls -d $(VENV_TORCH)/lib/python*/site-packages)/base.pth
	@$(VENV_TORCH)/bin/python $(INSTALL) -r requirements-torch.lock
	@touch $@

# With the environment of MaxText, whose lock file pins TensorFlow, too.
in_maxtext = @if python=$$($(PYTHON) scripts/find_python.py 3.12 3.13); then \
	$(MAKE) --no-print-directory MAXTEXT_PYTHON="$$python" $(VENV_MAXTEXT)/.ready && $(1); \
else \
	echo "$@ is skipped: MaxText needs Python 3.12 or 3.13, and neither python3.12, python3.13 nor pyenv has one"; \
fi

setup-maxtext:
	$(call in_maxtext,true)

# Some tests start four processes of MaxText: not more than two of them at a time.
test-maxtext:
	$(call in_maxtext,$(VENV_MAXTEXT)/bin/python -m pytest --numprocesses auto --maxprocesses 2 --dist loadfile tests/maxtext)

test-tensorflow:
	$(call in_maxtext,$(VENV_MAXTEXT)/bin/python -m pytest tests/tfds)

$(VENV_MAXTEXT)/.ready: requirements-maxtext.lock pyproject.toml
	@echo "Setting up $(VENV_MAXTEXT) (about two minutes the first time)"
	@$(MAXTEXT_PYTHON) -m venv $(VENV_MAXTEXT)
	@$(VENV_MAXTEXT)/bin/python $(INSTALL) -r requirements-maxtext.lock
	@$(VENV_MAXTEXT)/bin/python $(INSTALL) --no-deps --no-build-isolation --editable .
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
