# Two commands do everything: `make demo` runs the main job, `make test` passes the tests.
SHELL := bash

# The first Python that can make a virtual environment, or PYTHON=/path/to/python3.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13; do \
	"$$p" -c 'import ensurepip, venv' 2>/dev/null && { command -v "$$p"; break; }; done)
# A pip index for another build of torch, such as PyTorch's own index of CPU wheels.
TORCH_INDEX ?=
TIER ?= all

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: help demo test lint bench bench-rivals clean

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 14

demo: $(VENV)/demo  ## install, then train GraphSAGE on two "nodes" of two ranks each
	$(BIN)/toolkit run --on local --nodes 2 --ntasks-per-node 2

test: $(VENV)/test  ## install what the tests need, run every tier that can run here (TIER=unit|slurm|docker|pyxis)
	@ci/shellcheck install || true
	$(BIN)/python ci/tiers.py $(TIER)

lint: $(VENV)/test  ## ruff, mypy, the rooms of ARCHITECTURE.md, shellcheck and the CI templates
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/mypy $(shell grep -ls "^\#!.*python" ci/bench/*)
	ci/shellcheck
	PATH="$(CURDIR)/$(BIN):$$PATH" ci/lint_templates

bench: $(VENV)/test  ## measure the workloads against the tutorial's way and torchrun (up to 20 minutes)
	$(BIN)/python ci/bench/suite

bench-rivals: $(VENV)/rivals  ## build torch-sparse for `make bench` (20 minutes, a C++ compiler)

clean:  ## remove the environment and caches (runs/ stays)
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.11, 3.12 or 3.13 with venv was found." \
		"Install one (Debian, Ubuntu: apt-get install python3-venv) or name it: make PYTHON=/path/to/python3" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[workloads]'
	@touch $@

$(VENV)/test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[workloads,test,lint]'
	@touch $@ $(VENV)/demo

# A folder of its own, put on the path by the benchmark alone: PyG behaves otherwise where it finds
# these. --no-build-isolation: they are compiled against the torch that is measured.
$(VENV)/rivals: | $(VENV)/test
	$(PIP) setuptools wheel
	rm -rf $@.new
	FORCE_ONLY_CPU=1 MAX_JOBS=2 $(PIP) --no-build-isolation --no-deps --target $@.new \
		torch-scatter==2.1.2 torch-sparse==0.6.18 scipy
	mv $@.new $@
