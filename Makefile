# `make demo` and `make test` are the two commands of the README; `make help` lists the others.
#
# Everything is installed into $(VENV). A stamp per extra remembers that it is there, so that a second
# run starts at once; a change of pyproject.toml or constraints.txt installs again.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PROCESSES ?= 4

SHELL := /bin/sh
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PEERS := .venv-peers
QUIET := $(if $(MAKE_TERMOUT),,--quiet)
PIP := "$(BIN)/python" -m pip --disable-pip-version-check install $(QUIET) -c constraints.txt

.PHONY: help demo test test-rest test-all check canary pythons recipes docs docs-test soak faults lint format-check types layers names \
    words format bench curves dist clean
.DELETE_ON_ERROR:

help:
	@echo "make demo     collect 100,000 frames of CartPole, with progress and a summary"
	@echo "make test     run the tests, but for most repetitions for other backends and options"
	@echo "make test-all run all tests                 (ARGS='-k slots' goes to pytest; MUSTER_TESTS=quick leaves out nodes,"
	@echo "              MUSTER_TESTS=full runs all combinations of parameters, not only all pairs)"
	@echo "make test-rest run those that make test leaves out"
	@echo "make check    lint, format, types, layers, names, owners, words"
	@echo "make canary   run the core suite with the newest tensordict, gymnasium, NumPy and torch that can be installed"
	@echo "make pythons  run what can be run with the other Pythons of this machine, and check types for newer ones"
	@echo "make recipes  run all programs of docs/recipes, with Lightning, Hydra and accelerate"
	@echo "make docs     build the documentation into build/docs"
	@echo "make docs-test open every page of it, the live page and JupyterLab in Chromium (make docs first, after a change)"
	@echo "make dist     build the wheel and the source distribution into dist, and check them"
	@echo "make format   let ruff rewrite what it can"
	@echo "make bench    measure against a bare loop and the peers    (ARGS goes to the benchmarks)"
	@echo "make curves   learning curves of the examples, and the table of docs/examples.md (ARGS='--example sac --seeds 1')"
	@echo "make device   tests and benchmarks that need a CUDA device: eight minutes"
	@echo "make soak     every backend in turn for 30 minutes, with kills: memory, descriptors and counts"
	@echo "make faults   every fault on every backend with every on_failure: docs/fault_matrix.md"
	@echo "make clean    remove $(VENV), $(PEERS), runs/ and caches"
	@echo "PYTHON=python3.12 chooses the interpreter, VENV=dir the place of the environment."

demo: $(STAMPS)/classic
	"$(BIN)/muster" collect CartPole-v1 --frames 100k --num-envs 8 --policy mlp --seed 0 \
	    --out "runs/demo-$$(date +%Y%m%d-%H%M%S)"

# What is left out: tests/selection.py. Which process runs which tests, and why there are more processes
# than cores: tests/scheduling.py.
test: $(STAMPS)/test
	"$(BIN)/python" -m pytest -n $(PROCESSES) --durations=10 -m "not slow" $(ARGS)

test-rest: $(STAMPS)/test
	"$(BIN)/python" -m pytest -n $(PROCESSES) --durations=10 -m slow $(ARGS)

test-all: $(STAMPS)/test
	"$(BIN)/python" -m pytest -n $(PROCESSES) --durations=10 $(ARGS)

canary pythons: $(STAMPS)/dev
	"$(BIN)/python" scripts/versions.py $@ $(ARGS)

# Warnings are errors. Nothing is kept between builds: a page may depend on any docstring.
docs: $(STAMPS)/docs
	rm -rf build/docs build/doctrees
	"$(BIN)/python" -m sphinx -W --keep-going --quiet -j auto -d build/doctrees docs build/docs
	@echo "The documentation is in build/docs/index.html"

build/docs/index.html:
	$(MAKE) docs

docs-test: build/docs/index.html $(STAMPS)/site
	@command -v chromium >/dev/null 2>&1 || { echo "No Chromium here. On Debian: apt install chromium"; exit 1; }
	"$(BIN)/python" -m pytest -n 0 tests/site/pages.py tests/site/watch_page.py tests/site/notebook.py $(ARGS)

# Every program of docs/recipes, also those for packages that the tests do not install.
recipes: $(STAMPS)/test $(STAMPS)/recipes
	"$(BIN)/python" -c "import accelerate, hydra, lightning"
	"$(BIN)/python" -m pytest -n 0 tests/docs -k "recipes or spaces or troubleshooting" $(ARGS)

dist: $(STAMPS)/release
	rm -rf dist
	"$(BIN)/python" -m build $(if $(MAKE_TERMOUT),,--quiet) --outdir dist .
	"$(BIN)/python" -m twine check --strict dist/*

check: lint format-check types layers names owners words

lint: $(STAMPS)/dev
	"$(BIN)/ruff" check .

format-check: $(STAMPS)/dev
	"$(BIN)/ruff" format --check .

types: $(STAMPS)/dev
	"$(BIN)/python" -m mypy

layers: $(STAMPS)/dev
	"$(BIN)/lint-imports" --no-logo --no-cache

names: $(STAMPS)/dev
	"$(BIN)/python" scripts/check_names.py

owners: $(STAMPS)/dev
	"$(BIN)/python" scripts/check_owners.py

words: $(STAMPS)/dev
	"$(BIN)/python" scripts/check_words.py

format: $(STAMPS)/dev
	"$(BIN)/ruff" check --fix .
	"$(BIN)/ruff" format .

# The peers' versions contradict those of Muster's tests, so they get an environment of their own.
bench: $(STAMPS)/bench $(PEERS)/stamp
	MUSTER_BENCH_PYTHONS="$(CURDIR)/$(PEERS)/bin/python$${MUSTER_BENCH_PYTHONS:+:$$MUSTER_BENCH_PYTHONS}" \
	    "$(BIN)/python" -m benchmarks $(ARGS)

# CleanRL beside them: benchmarks/README.md says how to install it.
curves: $(STAMPS)/test
	"$(BIN)/python" -m benchmarks.curves $(ARGS)

# Needs an NVIDIA GPU, and a torch with CUDA in $(VENV).
# The script installs what is missing, and no more: on a rented machine, minutes count.
device:
	PYTHON="$(PYTHON)" scripts/on_device.sh

# Half an hour: ARGS="--minutes 5" for a look.
soak: $(STAMPS)/test
	"$(BIN)/python" -m benchmarks.soak $(ARGS)

# An hour. ARGS="--backend threads --fault SIGKILL" repeats some cells.
faults: $(STAMPS)/test
	"$(BIN)/python" -m benchmarks.fault_matrix $(ARGS)

clean:
	rm -rf "$(VENV)" "$(PEERS)" runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests scripts benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	    echo "Muster needs Python 3.10 or newer, and there is no '$(PYTHON)' here."; \
	    echo "Install it from your system's packages or python.org, or name one: make PYTHON=/path/to/python3 ..."; \
	    exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "Muster needs Python 3.10 or newer, and '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1)."; \
	    echo "Name a newer one: make PYTHON=python3.12 ..."; \
	    exit 1; }
	@echo "Making $(VENV) with $$("$(PYTHON)" --version 2>&1)"
	@"$(PYTHON)" -m venv "$(VENV)" || { \
	    rm -rf "$(VENV)"; \
	    echo "'$(PYTHON) -m venv' failed; its message is above. On Debian and Ubuntu: apt install python3-venv"; \
	    exit 1; }

$(PEERS)/stamp: benchmarks/requirements.txt | $(BIN)/python
	@echo "Installing what Muster is compared with into $(PEERS)"
	@"$(BIN)/python" -m venv "$(PEERS)"
	@"$(PEERS)/bin/python" -m pip --disable-pip-version-check install $(QUIET) -r benchmarks/requirements.txt
	@touch "$@"

$(STAMPS)/%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing muster-rl[$*] into $(VENV); the first time, PyTorch is the large part"
	@$(PIP) -e ".[$*]" || { \
	    echo "The installation failed; pip's message is above. To start over: make clean"; \
	    exit 1; }
	@mkdir -p "$(STAMPS)" && touch "$@"
