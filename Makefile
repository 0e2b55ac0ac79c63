# Every target works on a fresh clone with nothing but Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OUT ?= demo-output

.PHONY: setup demo docs docs-refresh lint test test-slow test-browser check format bench results clean

setup: $(STAMP)

# Only the tests use curvlinops, as an oracle. It is installed without its dependencies because one of them
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

# The site, into build/site: open build/site/index.html. Warnings are errors, and nothing is fetched.
docs: setup
	PYTHONPATH=website $(BIN)/zensical build --strict --clean
	$(BIN)/python website/check.py build/site

# Redraws the pictures of the documentation and refreshes what its code and the notebooks print.
docs-refresh: setup
	$(BIN)/python website/pictures.py
	$(BIN)/python website/pages.py --refresh $(if $(DATA),--data $(DATA))
	$(BIN)/python website/notebooks.py

# One process per core, one thread per process: the tests are many and small. Each process takes neighbouring tests, so
# that what a module prepares once is not prepared by all of them.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal
CODE := src tests bench examples website

# What a change must pass.
check: lint test

lint: setup
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --doctest-modules src

test: setup
	$(PYTEST) -m "not slow and not browser" tests

test-slow: setup
	$(PYTEST) -m "not browser" tests

# The page of errbar serve and the report, in a real browser. Needs chromium: on Debian, apt-get install chromium.
test-browser: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser tests/browser

format: setup
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

# A separate environment: the peers are never a dependency of the package.
BENCH := .bench-venv
$(BENCH)/.installed: pyproject.toml constraints.txt bench/requirements-peers.txt
	test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/pip install --quiet --constraint constraints.txt torch
	$(BENCH)/bin/pip install --quiet --constraint constraints.txt scipy --editable '.[export,serve]'
	$(BENCH)/bin/pip install --quiet --no-deps --requirement bench/requirements-peers.txt
	touch $@

bench: $(BENCH)/.installed
	$(BENCH)/bin/python -W ignore bench/against_peers.py
	$(BENCH)/bin/python -W ignore bench/structures.py
	$(BENCH)/bin/python bench/scaling.py
	$(BENCH)/bin/python bench/monte_carlo.py
	$(BENCH)/bin/python -W ignore bench/memory.py
	$(BENCH)/bin/python bench/plan.py
	$(BENCH)/bin/python bench/distributed.py
	$(BENCH)/bin/python bench/networks.py
	$(BENCH)/bin/python bench/whole_networks.py
	$(BENCH)/bin/python bench/classes.py
	$(BENCH)/bin/python bench/thousand.py
	$(BENCH)/bin/python bench/export.py
	$(BENCH)/bin/python bench/serve.py
	$(BENCH)/bin/python -W ignore bench/track.py
	$(BENCH)/bin/python bench/lowrank.py $(if $(DATA),--data $(DATA))
	$(if $(DATA),$(BENCH)/bin/python bench/drift.py --data $(DATA))
	$(if $(DATA),$(BENCH)/bin/python bench/ridge.py --data $(DATA))
	$(if $(DATA),$(BENCH)/bin/python bench/foreign.py --data $(DATA))

# The tables of the pages in docs/results, from the files that `errbar reproduce` wrote.
results: setup
	$(BIN)/python -c 'from pathlib import Path; from errbar.experiments.tables import refresh; \
		folder = Path("docs/results"); pages = (folder.with_suffix(".md"), *folder.glob("*.md")); \
		[refresh(page, folder) for page in pages]'

clean:
	rm -rf $(VENV) $(BENCH) $(OUT) build .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
