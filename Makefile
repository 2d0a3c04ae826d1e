# Two commands on a fresh machine with Python 3.10 to 3.12 and make:
#
#   make demo     real photographs through a vision tower, eager and compiled
#   make test     checks and tests
#
# PYTHON=python3.12   the interpreter (default: the first of python3, python3.12, python3.11, python3.10 that will do)
# VENV=path           use this virtual environment; what it lacks is installed into it, a torch that it has is kept
# SYSTEM=1            use $(PYTHON) as it is, with PYTHONPATH=. and nothing installed (an image that has torch already)
# TORCH=torch         the torch to install where there is none (default: the release that the tests run on)
# TORCH_INDEX=        where to look for it besides the package index (default: torch's CPU builds, which are small)
# DEMO="--device cuda", PYTEST="-k qwen3", BENCH="--calls 1x256"   arguments passed on; WORKERS=n test processes

TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
WORKERS ?= 2
OLDEST := 5.17.0
DEMO ?=
PYTEST ?=
BENCH ?=

supported = import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))
ifndef PYTHON
PYTHON := $(firstword $(foreach p,python3 python3.12 python3.11 python3.10,$(shell $(p) -c '$(supported)' 2>/dev/null && echo $(p))) python3)
endif

ifdef SYSTEM
RUN := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
READY := system
else
NEW_VENV := $(if $(VENV),,yes)
VENV ?= .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.vitcg-installed
endif

# Is a module importable, without importing it?
has = $(RUN) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("$(1)") is None)' 2>/dev/null
say = { echo "vitcg: $(1)" >&2; exit 1; }

.PHONY: demo test check tests tests-oldest bench format clean system python
.NOTPARALLEL:

demo: $(READY)
	@$(RUN) -m vitcg_backend demo $(DEMO)

test: check tests

check: $(READY)
	@if $(call has,ruff); then $(RUN) -m ruff check . && $(RUN) -m ruff format --check .; \
	 else echo "vitcg: ruff is not installed here, style is not checked"; fi
	@if $(call has,mypy); then $(RUN) -m mypy; else echo "vitcg: mypy is not installed here, types are not checked"; fi

# A test that hangs is ended after ten minutes, where pytest-timeout is installed. The tests of a module stay in one process, as
# far as the processes have enough to do: what one has compiled serves the next.
pytest = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN) -m pytest -q \
	 $$($(call has,xdist) && echo "-n $(WORKERS) --dist worksteal") $$($(call has,pytest_timeout) && echo "--timeout 600")

tests: $(READY)
	@$(pytest) $(PYTEST)

# The tests marked `towers` on the oldest transformers that is supported, which lies in a folder of its own before the
# environment's.
tests-oldest: $(READY) $(if $(SYSTEM),,.oldest/transformers-$(OLDEST).installed)
ifdef SYSTEM
	@echo "vitcg: SYSTEM=1 installs nothing, the tests on transformers $(OLDEST) are left out"
else
	@echo "vitcg: the tests of towers on transformers $(OLDEST)"
	@export PYTHONPATH="$(CURDIR)/.oldest"; \
	 $(RUN) -c 'import sys, transformers as t; sys.exit(t.__version__ != "$(OLDEST)")' 2>/dev/null \
	 || $(call say,transformers $(OLDEST) does not import from .oldest beside $(VENV). Remove .oldest to install it again.); \
	 $(pytest) -m towers
endif

.oldest/transformers-$(OLDEST).installed: | $(READY)
	@echo "vitcg: installing transformers $(OLDEST) into .oldest (log: .oldest/install.log)"
	@rm -rf .oldest && mkdir .oldest
	@$(RUN) -m pip install --retries 2 --target .oldest "transformers==$(OLDEST)" >.oldest/install.log 2>&1 \
	 || { grep -i error .oldest/install.log | tail -n 1 >&2; \
	   $(call say,transformers $(OLDEST) could not be installed. Is there a network and a package index? What pip said is in .oldest/install.log.); }
	@touch $@

bench: $(READY)
	@$(RUN) benchmarks/bench.py $(BENCH)

format: $(READY)
	@$(RUN) -m ruff check --fix . ; $(RUN) -m ruff format .

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache .venv .oldest

python:
	@$(PYTHON) -c '' 2>/dev/null || $(call say,$(PYTHON) does not run. Install Python 3.10 to 3.12 or name one: make PYTHON=/path/to/python3)
	@$(PYTHON) -c '$(supported)' || $(call say,Python 3.10 to 3.12 is needed and $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=python3.12)

system: python
	@$(RUN) -c 'import torch' 2>/dev/null || $(call say,SYSTEM=1 uses $(PYTHON) as it is and that has no torch. Leave SYSTEM out to install it.)

# The log keeps what pip said. Torch comes first and alone, from its own index where that answers: the default build of the
# package index brings gigabytes of CUDA.
$(VENV)/.vitcg-installed: pyproject.toml | $(if $(NEW_VENV),python)
	@test -z "$(NEW_VENV)" || test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); \
	 $(call say,$(PYTHON) cannot make a virtual environment with pip. Install its venv module (Debian and Ubuntu: apt install python3-venv) or use one that you have: make VENV=path.); }
	@$(VENV)/bin/python -c '$(supported)' 2>/dev/null || $(call say,no Python 3.10 to 3.12 at $(VENV)/bin/python. Remove $(VENV) or name another environment: make VENV=path.)
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(call say,$(VENV) has no pip. Add it with $(VENV)/bin/python -m ensurepip or run with nothing installed: make SYSTEM=1 PYTHON=$(VENV)/bin/python.)
	@echo "vitcg: installing into $(VENV) (log: $(VENV)/vitcg-install.log)"
	@{ $(call has,torch) || $(VENV)/bin/python -m pip install --no-deps --retries 1 --timeout 30 \
	     $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$(TORCH)"; } >$(VENV)/vitcg-install.log 2>&1 \
	 && $(VENV)/bin/python -m pip install --retries 2 -e ".[test]" >>$(VENV)/vitcg-install.log 2>&1 \
	 || { grep -i error $(VENV)/vitcg-install.log | tail -n 1 >&2; \
	   $(call say,the installation failed. Is there a network and a package index? What pip said is in $(VENV)/vitcg-install.log. To use an environment that has torch already: make VENV=path or make SYSTEM=1 PYTHON=path.); }
	@touch $@
