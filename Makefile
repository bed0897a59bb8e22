# Two commands set up everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Which combinations of settings the tests take: another part of sixteen at every commit on the main line, until all were had.
# `make test PART=3/16` takes that one, `make test PART=` all of them.
COMMITS := $(shell git rev-list --count --first-parent HEAD 2>/dev/null || date +%j)
export PART ?= $(shell expr $(COMMITS) % 16 + 1)/16

# Tests without Ray, in four parts of about one length: one process of pytest at a time would leave a core idle most of the time.
PARTS := unit-training unit-strategies unit-verification unit-others
OF_TRAINING := tests/training tests/launch
OF_STRATEGIES := tests/strategies tests/recording tests/cli
OF_VERIFICATION := tests/verification tests/studies tests/release tests/clusters
WITHOUT_RAY := $(BIN)/python -m pytest -m 'not ray and not gpu and not slow'

.PHONY: demo watch test lint types floors unit on-ray without-ray wheel $(PARTS) coverage slow docs ui clean
.DEFAULT_GOAL := test

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing torch, Ray, MLflow and the tools of the tests into $(VENV): a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(INSTALLED)  ## the main job on an embedded default: SQLite MLflow and a local Ray head
	$(BIN)/python jobs/demo.py

watch: $(INSTALLED)  ## a training with Prometheus and Alertmanager on this machine, until Ctrl-C
	$(BIN)/python jobs/watch.py

test: $(INSTALLED)  ## everything that CI checks, three of these at a time: each waits much of its time
	$(MAKE) --jobs=3 --output-sync=target lint types floors unit

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

floors: $(INSTALLED)
	$(BIN)/lint-imports --no-cache

unit: on-ray without-ray  # the tests on Ray first: they take longest and wait most

on-ray: $(INSTALLED)  ## from the files with such tests alone: to collect the others imports everything
	$(BIN)/python -m pytest -m 'ray and not gpu and not slow' $$(grep -rlw 'mark\.ray' tests --include='test_*.py')

without-ray: $(PARTS)

unit-training: $(INSTALLED)
	$(WITHOUT_RAY) $(OF_TRAINING)

unit-strategies: $(INSTALLED)
	$(WITHOUT_RAY) $(OF_STRATEGIES)

unit-verification: $(INSTALLED)
	$(WITHOUT_RAY) $(OF_VERIFICATION)

unit-others: $(INSTALLED)
	$(WITHOUT_RAY) tests $(addprefix --ignore=,$(OF_TRAINING) $(OF_STRATEGIES) $(OF_VERIFICATION))

coverage: $(INSTALLED)  ## which lines the tests reach; one test after another
	$(BIN)/python -m pytest -m 'not gpu and not slow' --cov --cov-report=term-missing:skip-covered --cov-fail-under=90

slow: PART :=
slow: $(INSTALLED)  ## minutes-long tests, and all combinations of settings
	$(BIN)/python -m pytest -m 'slow or combination'

docs: $(INSTALLED)  ## docs/config.md, docs/metrics.md and docs/schemas, from the code
	$(BIN)/python docs/generate.py

wheel: $(INSTALLED)  ## build/wheel/scaleray-*.whl, used far from the checkout before it is kept; make test does so too
	$(BIN)/python -m jobs.packaging.wheel

ui: $(INSTALLED)  ## MLflow's pages for the runs of `make demo`
	$(BIN)/scaleray tracking ui --uri sqlite:///.demo/mlflow.db

clean:  ## what demo and tests leave behind; the environment stays
	rm -rf .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage .coverage.*
