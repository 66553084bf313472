# `make` prints the targets. Everything lives in .venv; nothing else is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Stamps: an installation is repeated only when what it was made from has changed.
RUNTIME := $(VENV)/.installed-runtime
DEV := $(VENV)/.installed-dev
OLDEST := $(VENV)/.installed-oldest

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo run test oldest slow gpu check bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' Makefile

demo: $(RUNTIME) ## install, start a server, transcribe a human recording, stop
	@$(BIN)/python -P -m tests.demo

run: $(RUNTIME) ## serve on 127.0.0.1:8000 (NAPSCRIBE_HOST, NAPSCRIBE_PORT)
	@$(BIN)/napscribe serve

test: $(DEV) ## every test that needs neither minutes nor a GPU
	$(BIN)/python -m pytest -m "not slow and not gpu" --numprocesses=3 --dist=loadfile --durations=10

oldest: $(OLDEST) ## what runs on transformers' own code, with the oldest version that we take
	@PYTHONPATH=$(VENV)/oldest $(BIN)/python -P -c 'import transformers as t; assert "/oldest/" in t.__file__; print("transformers", t.__version__)'
	PYTHONPATH=$(VENV)/oldest $(BIN)/python -m pytest tests/torch/test_aligner.py tests/torch/test_checkpoint.py --numprocesses=2 --dist=loadfile

slow: $(DEV) ## long files, real-time pace, long chaos
	$(BIN)/python -m pytest -m slow --timeout=900 --durations=10

gpu: $(DEV) ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu --timeout=900 --durations=10

check: $(DEV) ## formatting, lint, types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

bench: $(DEV) ## the figures of docs/benchmarks.md; fails where a promised one is missed
	$(BIN)/python -m tests.bench

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@echo "Making $(VENV) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Napscribe needs Python 3.11 or newer; set PYTHON=")'
	@$(PYTHON) -m venv $(VENV)

# Order-only: the link's time is the interpreter's and says nothing.
$(RUNTIME): pyproject.toml | $(BIN)/python
	@echo "Installing Napscribe with its embedded model ..."
	@$(PIP) install --editable '.[embedded]'
	@touch $@

$(DEV): pyproject.toml ci/constraints.txt | $(BIN)/python
	@echo "Installing Napscribe with every engine and the tools of its tests ..."
	@$(PIP) install --constraint ci/constraints.txt --editable '.[embedded,qwen,aligner,dev]'
	@touch $@ $(RUNTIME)

$(OLDEST): ci/oldest.txt $(DEV)
	@$(PIP) install --no-deps --upgrade --target $(VENV)/oldest --requirement ci/oldest.txt
	@touch $@
