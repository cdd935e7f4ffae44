# The project's commands. `make demo` and `make test` set up .venv when it is missing; nothing else is needed
# but Python 3.11 or newer, pip, git and make.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

# One OpenMP thread a process: the tests run in two processes, and two busy OpenMP programs slow each other.
THREADS := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
PYTEST := $(THREADS) $(BIN)/python -m pytest -q

.PHONY: demo test lint prove clean

demo: $(INSTALLED)
	@$(BIN)/python scripts/demo.py

test: $(INSTALLED) lint
	ZOO_SHAPES=1 $(PYTEST) -n 2 -m "not untyped and not prove"
	$(PYTEST) -n 2 -m "untyped and not prove"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

prove: $(INSTALLED)
	$(BIN)/python scripts/prove.py

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "refzoo needs Python 3.11 or newer; make PYTHON=python3.11 names one")'
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[all]'
	touch $@

clean:
	rm -rf .venv out runs dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
