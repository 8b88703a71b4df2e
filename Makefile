# Two commands from a fresh clone, with nothing but Python >= 3.11 and make:
#   make demo    explain the built-in photo with the built-in model, write out/demo.png
#   make test    install the development extras and run every test, offline
# A Python of your choice: make demo PYTHON=python3.12. Another place for the environment: make test VENV=/tmp/v.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := $(shell find src -type f -not -name '*.pyc')
DEMO := raw-attention,rollout,grad-rollout,attcam,genatt,gradsam,gmar-l1,legrad,focusvit,attcat,saliency,ixg,gradcam,attnlrp,decompx+skipplus

.PHONY: help demo test lint clean
.DELETE_ON_ERROR:

help:
	@sed -n '1,4s/^# //p' Makefile

demo: $(VENV)/.installed
	@$(BIN)/clairvit compare demo --method '$(DEMO)' --out out/demo.png

# One thread a worker: two workers with two threads each would fight over two cores.
test: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 MPLBACKEND=Agg $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict

clean:
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(VENV)/pyvenv.cfg:
	@command -v $(PYTHON) >/dev/null || { echo "ClairViT needs Python 3.11 or newer, and there is no '$(PYTHON)' here. Name yours: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "ClairViT needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Name a newer one: make PYTHON=python3.12 …" >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# The development install is editable, so it serves the demo too and is never replaced by a plain one.
$(VENV)/.installed: $(VENV)/pyvenv.cfg pyproject.toml $(SOURCES)
	@if [ -e $(VENV)/.installed-dev ]; then $(MAKE) --no-print-directory $(VENV)/.installed-dev; \
	else echo "Installing clairvit (the first time downloads PyTorch: some minutes)"; $(PIP) .; fi
	@touch $@

$(VENV)/.installed-dev: $(VENV)/pyvenv.cfg pyproject.toml
	@echo "Installing clairvit with its development extras (the first time downloads PyTorch: some minutes)"
	@$(PIP) -e '.[dev]'
	@touch $@
