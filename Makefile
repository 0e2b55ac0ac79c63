# Every target works on a fresh clone with nothing but Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OUT ?= demo-output

.PHONY: setup demo test test-slow check format clean

setup: $(STAMP)

# curvlinops is an oracle of the tests only. It is installed without its dependencies because one of them
# (torchvision, which it does not use) has no build without CUDA.
$(STAMP): pyproject.toml constraints.txt tests/oracle-requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "errbar needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps --requirement tests/oracle-requirements.txt
	touch $(STAMP)

demo: setup
	$(BIN)/errbar demo --output $(OUT)

test: setup
	$(BIN)/python -m pytest -m "not slow" tests

test-slow: setup
	$(BIN)/python -m pytest tests

check: setup
	$(BIN)/ruff format --check src tests bench
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy
	$(BIN)/python -m pytest --doctest-modules src -m "not slow"
	$(BIN)/python -m pytest -m "not slow" tests

format: setup
	$(BIN)/ruff format src tests bench
	$(BIN)/ruff check --fix src tests bench

clean:
	rm -rf $(VENV) $(OUT) .pytest_cache .mypy_cache .ruff_cache .hypothesis
