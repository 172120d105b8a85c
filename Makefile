# fusion-node: everything a checkout needs, in its own .venv. `make help` lists the targets.
#
# A stamp file per set of dependencies makes the second run a matter of milliseconds; editing pyproject.toml or
# constraints.txt makes the next run install again.

VENV := .venv
BIN := $(VENV)/bin
# Arguments for pip, for example an index with CPU-only builds of torch, or -q.
PIP_ARGS ?=
# Arguments of the demonstration, for example DEMO_ARGS="--prompt 'Why is the sky blue?'"
DEMO_ARGS ?=
# Arguments of the tests, which run in two processes side by side; -n 0 runs them in one.
PYTEST_ARGS ?= -n 2 --dist loadgroup --no-loadscope-reorder
# The interpreter that the environment is made from; the first of 3.13, 3.12, 3.11 and python3 that will do, if empty.
PYTHON ?=

# pip before 23.1 builds packages without pyproject.toml the old way, with a warning for each; later ones ignore this.
export PIP_USE_PEP517 := 1

PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo test lint clean

help:  ## List the targets and the variables
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'
	@echo "Variables: PYTHON (the interpreter to use), PIP_ARGS, DEMO_ARGS, PYTEST_ARGS."
	@echo "Without a GPU on Linux, PIP_ARGS='--extra-index-url URL' with PyTorch's CPU index saves gigabytes."

setup: $(VENV)/.stamp-setup  ## Install fusion-node and what it needs to run into .venv
	@echo "fusion-node is installed: $(BIN)/fusion-node --help"

setup-dev: $(VENV)/.stamp-setup-dev  ## Add what the checks and the benchmarks need
	@echo "The checks are installed: make test, make lint"

demo: $(VENV)/.stamp-setup  ## Serve a model from several nodes on this machine and ask it something
	@$(BIN)/fusion-node demo $(DEMO_ARGS)

test: $(VENV)/.stamp-setup-dev  ## Run the tests, without the slow ones
	@$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

lint: $(VENV)/.stamp-setup-dev  ## Check style, formatting, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:  ## Remove the environment and everything that was built
	rm -rf $(VENV) build dist *.egg-info deploy/fastecdsa-standin/build deploy/fastecdsa-standin/*.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-python:
	@python=$$(PYTHON='$(PYTHON)' sh deploy/find-python.sh) && \
	echo "Making $(VENV) with $$python" && "$$python" -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-setup: $(VENV)/.stamp-python pyproject.toml constraints.txt deploy/fastecdsa-standin/pyproject.toml
	@echo "Installing fusion-node into $(VENV); the first time takes a few minutes."
	@$(BIN)/python deploy/fastecdsa-standin/install.py $(PIP_ARGS) -c constraints.txt
	@$(PIP) -e .
	@touch $@

$(VENV)/.stamp-setup-dev: $(VENV)/.stamp-setup
	@$(PIP) -e '.[test,lint,bench]'
	@touch $@
