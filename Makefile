# Everything runs in .venv, which the targets make themselves. Python 3.11, make and g++ are all they need.

PYTHON ?= python3
PORT ?= 8000
MODEL := smollm2
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup model serve test lint type bench clean

help:
	@echo "make setup   the environment for development, in $(VENV)"
	@echo "make serve   serve $(MODEL) at http://127.0.0.1:$(PORT) (PORT=... for another port)"
	@echo "make test    all tests; ARGS=... goes on to pytest"
	@echo "make lint    style"
	@echo "make type    types"
	@echo "make bench   benchmarks; ARGS=... names another than generate"
	@echo "make clean   remove $(VENV), builds and caches"

setup: $(VENV)/.dev

# Two stamps, made anew when pyproject.toml changes: serving needs a fraction of what developing does.
$(VENV)/.runtime: pyproject.toml
	@echo "== installing pocketllm into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[torch]'
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "== installing the tools for development into $(VENV)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]'
	@touch $@

model: $(VENV)/.runtime
	@$(BIN)/pocketllm models path $(MODEL) >/dev/null 2>&1 || $(BIN)/pocketllm models pull $(MODEL)

serve: model
	@echo "== serving $(MODEL) on port $(PORT); ctrl-C ends"
	@exec $(BIN)/pocketllm serve --model $(MODEL) --port $(PORT)

test: $(VENV)/.dev model
	@echo "== tests, the real model's last"
	@$(BIN)/python -m pytest --quiet --numprocesses auto --dist worksteal $(ARGS)

lint: $(VENV)/.dev
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

type: $(VENV)/.dev
	@echo "== mypy"
	@$(BIN)/mypy

bench: $(VENV)/.dev model
	@echo "== benchmarks"
	@$(BIN)/python -m pocketllm.bench $(or $(ARGS),generate)

clean:
	@echo "== removing $(VENV), builds and caches; pulled models stay"
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
