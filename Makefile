# Two commands from a fresh clone, with nothing but Python >= 3.11 and make:
#   make demo    explain the built-in photo with the built-in model, write out/demo.png
#   make test    install the development extras and run every test, offline; sweeps over methods and models are sampled
# Further: make test-quick (a sample, under two minutes), make test-all (every pair of every sweep: before a release),
# make mutation (do the tests see mistakes?), make test-portable (numbers on other kernels), make fuzz
# (10,000 odd inputs; 2,000 of them are part of make test), make lint, make coverage (of make test-quick, with a floor),
# make matrix (lowest and newest versions, every Python that is here), make docs (the site, into out/site), make bench
# (next to other libraries), make lists (what lists methods and metrics), make what-works (docs/what-works.md), make gallery (the pictures of README.md and docs/gallery.md),
# make integrations (the tests with Quantus and pytorch-grad-cam, which are too large for the development extras).
# A Python of your choice: make demo PYTHON=python3.12. Another place for the environment: make test VENV=/tmp/v.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := $(shell find src -type f -not -name '*.pyc')
DEMO := raw-attention,rollout,grad-rollout,attcam,genatt,gradsam,gmar-l1,legrad,focusvit,attcat,saliency,ixg,gradcam,attnlrp+plus,decompx+skipplus

.PHONY: help demo test test-all test-quick mutation test-portable fuzz integrations lists what-works gallery lint coverage matrix docs bench clean
.DELETE_ON_ERROR:

help:
	@sed -n '1,11s/^# //p' Makefile

demo: $(VENV)/.installed
	@$(BIN)/clairvit compare demo --method '$(DEMO)' --out out/demo.png

QUICK := not (slow or browser or ray or cuda)
# One thread a worker: two workers with two threads each would fight over two cores. Bytecode is written, whatever the
# shell says: without it every worker, and every process that a test starts, compiles torch, timm and transformers anew.
PYTEST := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 MPLBACKEND=Agg $(BIN)/python -m pytest
test: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 $(PYTEST) -n $(JOBS) $(ARGS)

test-quick: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 $(PYTEST) -n $(JOBS) --cases=1 -m '$(QUICK)' $(ARGS)

test-all: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 $(PYTEST) -n $(JOBS) --cases=all $(ARGS)

# Seeded mistakes in a copy of the package, and which of them the tests see: docs/testing.md. It goes on where it stopped.
mutation: $(VENV)/.installed-dev
	@$(BIN)/python benchmarks/mutation.py --jobs $(JOBS) --out out/mutation $(ARGS)

# The numeric tests, once a setting. A setting is a set of kernels, a number of threads, a hash seed and an order; every
# value of each appears in at least one of them. make test-portable SETTINGS=avx2 runs one, NUMERIC selects other tests.
SETTINGS ?= native avx2 sse
NUMERIC ?= numeric and not cuda
environment-native := OMP_NUM_THREADS=1 PYTHONHASHSEED=1
environment-avx2 := OMP_NUM_THREADS=2 PYTHONHASHSEED=2 OMP_WAIT_POLICY=passive \
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
environment-sse := OMP_NUM_THREADS=1 PYTHONHASHSEED=1 \
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2
order-native :=
order-avx2 := --random-order --random-order-seed=1
order-sse := --random-order --random-order-seed=2

test-portable: $(VENV)/.installed-dev
	@failed=; for setting in $(SETTINGS); do \
		$(MAKE) --no-print-directory test-portable-$$setting || failed="$$failed $$setting"; \
	done; \
	if [ -n "$$failed" ]; then echo "test-portable: FAILED under:$$failed (of: $(SETTINGS))" >&2; exit 1; fi; \
	echo "test-portable: passed under: $(SETTINGS)"

test-portable-%: $(VENV)/.installed-dev
	@test -n '$(environment-$*)' || { echo "There is no setting '$*'; expected one of: native avx2 sse." >&2; exit 2; }
	@echo '== $*: $(strip $(environment-$*)) $(order-$*)'
	@$(environment-$*) $(BIN)/python -c 'import torch; print("kernels:", torch.backends.cpu.get_cpu_capability() + ", threads:", torch.get_num_threads())'
	@$(environment-$*) $(PYTEST) -n $(JOBS) $(order-$*) -m '$(NUMERIC)' $(ARGS)

# The same cases every time; make fuzz CASES=50000 SEED=1 tries others.
CASES ?= 10000
SEED ?= 20260714

fuzz: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 CLAIRVIT_FUZZ_CASES=$(CASES) CLAIRVIT_FUZZ_SEED=$(SEED) $(PYTEST) -n $(JOBS) tests/fuzz $(ARGS)

# OpenCV twice and scikit-learn: 330 MB that no other test needs. They stay in the environment afterwards.
integrations: $(VENV)/.installed-dev
	@$(PIP) quantus grad-cam
	@OMP_NUM_THREADS=1 $(PYTEST) tests/integrations -rs $(ARGS)

# The picture of the page is a screenshot, which needs a chromium.
gallery: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 MPLBACKEND=Agg $(BIN)/python docs/generate_gallery.py

# What lists methods and metrics: docs/methods.md, metrics.md and papers.md, the count in README.md, tests/registry.txt.
lists: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python docs/generate_lists.py

# Which methods and targets run on which family of models; written to a copy first, so that an error keeps the page.
what-works: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python docs/generate_what_works.py > docs/what-works.md.new
	@mv docs/what-works.md.new docs/what-works.md

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict
	@$(BIN)/lint-imports --no-logo --no-cache

# Lines that a sample of the tests runs; the floor is the share below which the target fails.
FLOOR ?= 75

coverage: $(VENV)/.installed-dev
	@rm -f .coverage .coverage.*
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 MPLBACKEND=Agg $(BIN)/python -m coverage run -m pytest --cases=1 -m '$(QUICK)' $(ARGS)
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage html --quiet --directory out/coverage
	@$(BIN)/python -m coverage report --format=total --fail-under=$(FLOOR)

matrix:
	@$(PYTHON) .ci/matrix.py $(ARGS)

# An environment of its own: the site needs neither torch nor the package installed, its API reference reads the sources.
docs: $(VENV)-docs/.installed
	@$(VENV)-docs/bin/mkdocs build --strict
	@echo "out/site/index.html; with search: $(PYTHON) -m http.server --directory out/site"

$(VENV)-docs/.installed: pyproject.toml
	@$(PYTHON) -m venv $(VENV)-docs
	@$(VENV)-docs/bin/python -m pip install --quiet --disable-pip-version-check $$($(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	@touch $@

# This library next to others, in one run: out/bench.md. BENCH='--device cuda --dtype bfloat16 --batch 32' on a GPU.
bench: $(VENV)/.installed-dev
	@$(PIP) -e '.[bench]'
	@$(PIP) --no-deps 'legrad-torch>=1.1'
	@OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/peers.py --out out/bench.md $(BENCH)

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
