# `make demo` trains, `make test` tests; each first sets up what it needs in .venv. ARGS are more arguments of either, as
# in `make demo ARGS=training.steps=60`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow test-gpu check format docs site benchmarks clean

demo: .venv/ready
	@folder=runs/demo; number=1; \
	while [ -e $$folder ]; do number=$$((number + 1)); folder=runs/demo-$$number; done; \
	$(BIN)/crosscut train output.folder=$$folder $(ARGS)

# The processes of the tests share compiled modules, whatever the shell is set to.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
IN_TWO := -n 2 --dist loadfile --no-loadscope-reorder

test: .venv/ready
	$(PYTEST) -m "not slow" $(IN_TWO) $(ARGS)

# PART=7/18: one of 18 parts that take about equally long. PART=extras: the tests that need the extras `harness` and
# `ray`. Without PART: all slow tests.
test-slow: $(if $(findstring /,$(PART)),.venv/ready,.venv/ready-slow)
	$(PYTEST) -m slow $(if $(PART),--part $(PART)) $(IN_TWO) $(ARGS)

test-gpu: .venv/ready
	$(BIN)/python -m pytest -m gpu

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check
	$(BIN)/python docs/docstrings.py
	$(BIN)/python docs/deletions.py

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/ready
	$(BIN)/python docs/generate.py

# The pages of docs/ and the reference, for a browser: build/site/html/index.html.
site: .venv/ready
	$(BIN)/python docs/site/build.py

benchmarks: .venv-benchmarks/ready
	.venv-benchmarks/bin/python benchmarks/training/train_step.py
	.venv-benchmarks/bin/python benchmarks/corpus/tokenization.py --memory

clean:
	rm -rf .venv .venv-benchmarks build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.venv/ready: pyproject.toml constraints.txt
	PYTHON=$(PYTHON) sh .ci/setup .venv dev constraints.txt
	touch $@

# The extra packages that only slow tests need. Installing them would take longer than `make test`.
.venv/ready-slow: .venv/ready
	PYTHON=$(PYTHON) sh .ci/setup .venv dev,harness,ray constraints.txt
	touch $@

# Separate from .venv, because litgpt requires a numpy below 2.
.venv-benchmarks/ready: pyproject.toml constraints-benchmarks.txt
	PYTHON=$(PYTHON) sh .ci/setup .venv-benchmarks benchmarks constraints-benchmarks.txt
	touch $@
