# Everything on a fresh machine: `make test`, `make demo`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: test check demo doctor clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,train]'
	touch $@

check: $(STAMP)
	$(BIN)/ruff check src tests recipes
	$(BIN)/ruff format --check src tests recipes
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

test: check
	$(BIN)/python -m pytest -n 2

demo: $(STAMP)
	$(BIN)/outrider compare "$$(printf 'import json\nfrom pathlib import Path\n\n\ndef load_config(path: Path) -> dict:\n    ')"

doctor: $(STAMP)
	$(BIN)/outrider doctor

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
