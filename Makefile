# Everything that people and CI do here has a name in this file; `make help` lists them.
#
#   make PYTHON=python3.12 demo          another interpreter (3.11 or newer)
#   make TORCH=torch==2.13.0 demo        torch for GPUs, as PyPI has it for this machine
#   make VENV=/tmp/env test              another place for the environment
#
# The environment is made on first use and again when pyproject.toml changes. Without TORCH a CPU
# build is installed (from your own pip configuration if it has one, else from pytorch.org), and an
# environment that holds another torch keeps it.

PYTHON ?= python3
VENV ?= .venv
CPU_TORCH := torch==2.13.0+cpu
CPU_INDEX := https://download.pytorch.org/whl/cpu
ifeq ($(origin TORCH),undefined)
TORCH := $(or $(shell cat $(VENV)/torch.txt 2>/dev/null),$(CPU_TORCH))
endif

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
HAS_TORCH := $(VENV)/has-$(subst =,,$(TORCH))
HAS_MOESAIC := $(VENV)/has-moesaic
HAS_TOOLS := $(VENV)/has-tools

DEMO := build/demo
# The demo's model knows samples of 128 bytes; what is longer than that is new to it.
WRITE := --prompt "The with statement" --prompt "A list is" --prompt "If the operand" \
  --set temperature=0.5 --set max_tokens=100
# One thread a process, as ranks of the tests are processes too; two files of tests at a time.
# Tests start hundreds of processes: what Python compiles is kept, even where it was told not to.
TEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
BOTH := -n 2 --dist loadfile --no-loadscope-reorder
CODE := src tests benchmarks examples docs
HOUSE := tests/test_architecture.py tests/test_words.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo fix check test test-all wheel bench docs env clean

help:  ## list the targets
	@sed -n 's/^\([a-z%][a-zA-Z%-]*\):.*##/  make \1@/p' Makefile | awk -F@ '{printf "%-20s%s\n", $$1, $$2}'

demo: $(HAS_MOESAIC)  ## plan and train a small mixture of experts on two ranks, let it write, show its report
	@mkdir -p $(DEMO) && rm -rf $(DEMO)/run
	@$(BIN)/python examples/demo/make_text.py $(DEMO)
	$(BIN)/moesaic train examples/demo/demo.toml --nproc 2 --out $(DEMO)/run
	$(BIN)/moesaic generate $(DEMO)/run $(WRITE)
	@echo
	@echo "The report of the run: $(CURDIR)/$(DEMO)/run/report.html"

fix: $(HAS_TOOLS)  ## mend what ruff can mend
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

check: $(HAS_TOOLS)  ## lint, format, types, architecture, wording
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(TEST) $(HOUSE)

test: $(HAS_TOOLS)  ## the default suite but what check runs, without a GPU: nine to sixteen minutes on two cores
	$(TEST) $(BOTH) -m "not soak" $(addprefix --ignore=,$(HOUSE))

test-all: $(HAS_TOOLS)  ## long runs too
	$(TEST) $(BOTH)

wheel: $(HAS_TORCH)  ## build/wheel/moesaic-*.whl, installed alone into a fresh environment and imported
	@rm -rf build/wheel && mkdir -p build/wheel
	@$(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	@$(BIN)/python -m venv --without-pip build/wheel/fresh
	@$(BIN)/python -m pip --python build/wheel/fresh/bin/python install -qq \
	  --disable-pip-version-check --no-deps build/wheel/*.whl
	@cd build/wheel && env -u PYTHONPATH fresh/bin/python -c \
	  'import moesaic; print("moesaic", moesaic.__version__, "installs from its wheel")'
	@test -x build/wheel/fresh/bin/moesaic && ls build/wheel/*.whl

bench: $(HAS_TOOLS)  ## every benchmark; one of them: make bench-foundation
	$(BIN)/python -m benchmarks

bench-%: $(HAS_TOOLS)
	$(BIN)/python -m benchmarks $*

docs: $(HAS_TOOLS)  ## the pages that are generated: configuration, results
	$(BIN)/python docs/generate.py
	$(BIN)/python benchmarks/generate.py

env: $(HAS_TOOLS)  ## the environment with everything in it, for `. $(VENV)/bin/activate`
	@echo "$(VENV) is ready"

clean:  ## remove the environment, what was built and every cache
	rm -rf build $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "moesaic needs Python 3.11 or newer: make PYTHON=python3.11 ..." >&2; exit 1; }
	@echo "making an environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(HAS_TORCH): | $(BIN)/python
	@echo "installing $(TORCH) into $(VENV) (once; about 200 MB for a CPU build, about a minute)"
	@log=$(VENV)/torch.log; rm -f $(VENV)/has-torch*; \
	$(PIP) "$(TORCH)" >$$log 2>&1 || { \
	  case "$(TORCH)" in *+cpu) $(PIP) --index-url $(CPU_INDEX) "$(TORCH)" >>$$log 2>&1;; *) false;; esac; \
	} || { cat $$log >&2; echo "pip found no $(TORCH): show it one (--find-links, a mirror; see" \
	  "pip config), or choose another (make TORCH=torch==2.13.0 is the one of PyPI)" >&2; exit 1; }
	@echo "$(TORCH)" >$(VENV)/torch.txt && touch $@

$(HAS_MOESAIC): pyproject.toml $(HAS_TORCH)
	@echo "installing moesaic and what it stands on into $(VENV) (once; about a minute)"
	@$(PIP) --editable '.[serve]'
	@touch $@
	@echo "installed"

$(HAS_TOOLS): pyproject.toml $(HAS_TORCH)
	@echo "installing moesaic, what it stands on, and what tests, checks and benchmarks need" \
	  "into $(VENV) (once; some minutes)"
	@$(PIP) --editable '.[dev]'
	@touch $(HAS_MOESAIC) $@
	@echo "installed"
