# One command runs the demo, one passes the tests; both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test test-all test-portable lint types check docs results clean

demo: $(VENV)/.demo-ready
	$(BIN)/doublehead demo

test: $(VENV)/.dev-ready
	OMP_NUM_THREADS=1 $(PYTEST) -m "not slow"

test-all: $(VENV)/.dev-ready # with the slow tests
	OMP_NUM_THREADS=1 $(PYTEST)

test-portable: $(VENV)/.dev-ready # all tests as other machines compute; each line in another order, from another seed
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=1 $(PYTEST) --shuffle 1
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE $(PYTEST) --shuffle 2
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 $(PYTEST) --shuffle 3
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE $(PYTEST) --shuffle 4
	OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE $(PYTEST) --shuffle 5

lint: $(VENV)/.dev-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev-ready
	$(BIN)/mypy

docs: $(VENV)/.dev-ready # into site/; a warning is an error
	$(BIN)/sphinx-build --fresh-env --fail-on-warning --keep-going --quiet -d build/doctrees docs site

results: $(VENV)/.dev-ready # docs/results and what pages quote, from committed result files; no GPU, under a minute
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
