# One command runs the demo, one passes the tests; both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test test-slow test-portable test-installs test-oldest lint types check docs results fuzz clean

demo: $(VENV)/.demo-ready
	$(BIN)/doublehead demo

test: $(VENV)/.dev-ready
	OMP_NUM_THREADS=1 $(PYTEST) -m "not slow"

test-slow: $(VENV)/.dev-ready # the slow tests alone
	OMP_NUM_THREADS=1 $(PYTEST) -m slow

test-portable: $(VENV)/.dev-ready # all tests as other machines compute; each line in another order, from another seed
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=1 $(PYTEST) --shuffle 1
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE $(PYTEST) --shuffle 2
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 $(PYTEST) --shuffle 3
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE $(PYTEST) --shuffle 4
	OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE $(PYTEST) --shuffle 5

test-installs: $(VENV)/.dev-ready # the wheel with each extra, and the source distribution, in environments of their own
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/installs

# The core of the suite with the lowest version of each dependency that pyproject.toml allows.
OLDEST := build/oldest
OLDEST_PYTHON ?= 3.10
CORE := $(addprefix tests/test_,bins.py predictions.py losses.py metrics*.py calibration_head.py calibrators_*.py double_head.py files.py summary.py cli_*.py report_command.py training_loop.py)
test-oldest: $(VENV)/.dev-ready
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv venv --quiet --clear --python $(OLDEST_PYTHON) $(OLDEST)
	$(BIN)/uv pip install --quiet --python $(OLDEST) --resolution lowest-direct -e ".[cluster,report,sklearn,train]" "pytest>=8" "pytest-xdist>=3.6"
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 --dist worksteal $(CORE)

lint: $(VENV)/.dev-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev-ready
	$(BIN)/mypy

docs: $(VENV)/.dev-ready # into site/; a warning is an error
	$(BIN)/sphinx-build --fresh-env --fail-on-warning --keep-going --quiet -d build/doctrees docs site

results: $(VENV)/.dev-ready # results.csv, tables and figures from committed logits; no GPU, a few minutes
	$(BIN)/python experiments/make.py

fuzz: $(VENV)/.dev-ready # 20,000 damaged files of every format; each gives numbers or one sentence
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fuzz_files.py

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
