# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Written last, so that a set-up that was cut short is done again.
SET_UP := .venv/.set-up

.PHONY: setup lint test test-fast demo tiny compat compat-all clean

setup: $(SET_UP)

$(SET_UP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and \
	"setup: requirements.lock is for Python 3.11: name one with make PYTHON=...")'
	@echo "setup: 1/5 virtual environment in .venv"
	@$(PYTHON) -m venv .venv
	@echo "setup: 2/5 torch"
	@$(PIP) install --no-compile torch==2.13.0
	@echo "setup: 3/5 requirements.lock"
	@$(PIP) install --no-compile --no-deps --requirement requirements.lock
	@echo "setup: 4/5 the project"
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@echo "setup: 5/5 bytecode"
# pip would compile on one core, which is half of its time. Some packages ship files that
# are not meant to compile.
	@$(BIN)/python -m compileall -q -j 0 .venv/lib > /dev/null || true
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup
	$(BIN)/pytest

test-fast: setup
	$(BIN)/pytest -m "not live"

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
