# One command runs the demo, one passes the tests; both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types check docs results clean

demo: $(VENV)/.demo-ready
	$(BIN)/doublehead demo

test: $(VENV)/.dev-ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/.dev-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev-ready
	$(BIN)/mypy

docs: $(VENV)/.dev-ready # into site/; a warning is an error
	$(BIN)/sphinx-build --fresh-env --fail-on-warning --keep-going --quiet -d build/doctrees docs site

results: $(VENV)/.dev-ready # results.csv, tables and figures from committed logits; no GPU, a few minutes
	$(BIN)/python experiments/make.py

check: lint types test

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo-ready: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[demo]"
	@touch $@

$(VENV)/.dev-ready: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@ $(VENV)/.demo-ready

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache
