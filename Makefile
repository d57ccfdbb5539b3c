# erllama: the commands a newcomer needs. `make help` lists them.
# Needs python3 (3.11 or newer, with venv), a C++ compiler and make; everything else is fetched.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Written once pip works: an interpreter alone does not make a virtual environment.
HAS_PIP := $(VENV)/.erllama-pip
DEPS := $(VENV)/.erllama-requirements
DEV_DEPS := $(VENV)/.erllama-requirements-dev
INSTALLED := $(VENV)/.erllama-installed
# Passed to build_libllama.py, e.g. make build BUILD="--backend cuda"
BUILD ?=

.DEFAULT_GOAL := help
.PHONY: help demo test asan check build sources clean distclean

help:  ## this list
	@echo "usage: make TARGET"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 14

demo: build  ## build everything, then watch a real model answer
	@$(VENV)/bin/erllama demo

test: build sources check $(DEV_DEPS)  ## build everything, then run all checks and tests
	$(PY) -X dev -W error -m pytest

asan: build sources $(DEV_DEPS)  ## run the tests of our C++ under AddressSanitizer (Linux, GCC)
	$(PY) tools/asan.py

check: build $(DEV_DEPS)  ## lint, types and layers only
	$(PY) tools/check.py

build: $(DEPS)  ## the virtual environment, the native library and the package in it
	@$(PY) build_libllama.py $(BUILD)
	@$(MAKE) --silent --no-print-directory $(INSTALLED)

sources: $(DEPS)  ## only fetch, unpack and verify the llama.cpp sources
	@$(PY) build_libllama.py --fetch-only

clean:  ## remove what was built here (the cache folder and .venv stay)
	rm -rf build dist erllama/llama/_native $(INSTALLED)

distclean: clean  ## clean, and remove .venv and the unpacked sources too
	rm -rf $(VENV)
	find vendor/llama.cpp -mindepth 1 -maxdepth 1 ! -name pin.toml ! -name README.md -exec rm -rf {} +

$(HAS_PIP):
	@command -v $(PYTHON) >/dev/null || { echo "error: there is no $(PYTHON). Debian, Ubuntu: apt install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11. Name a newer one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	  echo "==> Creating $(VENV)"; \
	  old=; test -e $(VENV) && old=yes; \
	  { $(PYTHON) -m venv $(VENV) && $(PY) -m pip --version; } >$(VENV).log 2>&1 || { \
	    tail -n 5 $(VENV).log; rm -f $(VENV).log; test "$$old" || rm -rf $(VENV); \
	    echo "error: $(PYTHON) cannot make a virtual environment with pip. Debian, Ubuntu: apt install python3-venv"; \
	    exit 1; }; \
	  rm -f $(VENV).log; }
	@touch $@

# pip says warnings and errors only: two hundred lines of packages interest nobody who wants to see a model answer.
define install
@$(PY) tools/requirements.py $(1) > $@.part
@$(PY) -m pip install --disable-pip-version-check --quiet -r $@.part || \
  { echo "error: the package index could not be used. Check the network and: $(PY) -m pip config list"; exit 1; }
@mv $@.part $@
endef

$(DEPS): pyproject.toml tools/requirements.py | $(HAS_PIP)
	@echo "==> Installing what the build and erllama need into $(VENV) (about a minute)"
	$(call install)

$(DEV_DEPS): pyproject.toml tools/requirements.py $(DEPS)
	@echo "==> Installing what checks and tests need into $(VENV) (about a minute)"
	$(call install,--dev)

# Only after the native build, which ran in the foreground: the install need not repeat it.
$(INSTALLED): $(DEPS) pyproject.toml
	@echo "==> Installing erllama into $(VENV)"
	@ERLLAMA_SKIP_NATIVE_BUILD=1 $(PY) -m pip install --disable-pip-version-check --quiet \
	  --no-build-isolation --no-deps -e .
	@touch $@
