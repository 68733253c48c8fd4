# `make lab` and `make test` set up .venv on first use, and again when what is
# installed changes. PIP_ARGS is passed to pip, ARGS to what is run.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed-for
PIP_ARGS ?=
ARGS ?=
CELL_TIMEOUT_S := 180
# JupyterLab refuses to run as root, which is who one is in most containers.
ROOT_FLAG := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: setup lab test test-all test-gpu lint notebooks nbval picture clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[notebooks,dev]'
	touch $@

lab: setup
	$(BIN)/jupyter lab $(ROOT_FLAG) notebooks $(ARGS)

test: lint
	$(BIN)/python -m pytest -m 'not slow' tests $(ARGS)
	$(MAKE) nbval

test-all: lint
	$(BIN)/python -m pytest tests $(ARGS)
	$(MAKE) nbval

test-gpu: setup
	$(BIN)/python -m pytest tests/gpu $(ARGS)

# One notebook at a time: its ranks want the cores for themselves.
nbval: setup
	$(BIN)/python -m pytest --nbval-lax --nbval-current-env \
		--nbval-cell-timeout=$(CELL_TIMEOUT_S) --durations=5 -p no:cacheprovider \
		--timeout=600 notebooks

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.notebooks.normalize --check notebooks

# Execute every notebook and bring it into the form in which it is committed.
notebooks: setup
	$(BIN)/python -m tests.notebooks.execute notebooks
	$(BIN)/python -m tests.notebooks.normalize notebooks

# The picture in the README, from a run on this machine.
picture: setup
	$(BIN)/python docs/live_run.py

clean:
	rm -rf .venv artifacts build dist *.egg-info
