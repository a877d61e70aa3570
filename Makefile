# `make demo` trains, `make test` tests; each first sets up what it needs in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow check format docs benchmarks clean

demo: .venv/ready
	rm -rf runs/demo
	$(BIN)/crosscut train

test: .venv/ready
	$(BIN)/python -m pytest -m "not slow"

test-slow: .venv/ready
	$(BIN)/python -m pytest -m slow

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/ready
	$(BIN)/python docs/generate.py

benchmarks: .venv/ready
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[benchmarks]'
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/tokenize.py

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.venv/ready: pyproject.toml constraints.txt
	PYTHON=$(PYTHON) sh .ci/setup
	touch $@
