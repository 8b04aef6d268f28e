# make demo   a transformer block compiled: plan, one kernel, forward and backward, errors, bytes
# make test   everything that needs no GPU; of long parametrized tests a sample, drawn anew in each run
# make sweep  every case of every test, 2,000 random programs, and PyTorch's samples of every operator: hours
# make lint   ruff and pyright
# make docs   the documentation as a site, in site/; a broken link is an error
# Each but docs makes .venv with the versions of constraints.txt when it is missing or out of date. With VERSIONS=oldest or
# VERSIONS=newest it is .venv-oldest or .venv-newest, with those of constraints-oldest.txt or constraints-newest.txt
# in their place; ruff and pyright look at the pinned ones alone.

PYTHON ?= python3
VERSIONS ?= pinned
VENV ?= .venv$(if $(filter pinned,$(VERSIONS)),,-$(VERSIONS))
JOBS ?= 2
SEED ?= $(shell date +%s)
BIN := $(VENV)/bin
OTHERS := $(if $(filter pinned,$(VERSIONS)),,constraints-$(VERSIONS).txt)
$(if $(filter oldest pinned newest,$(VERSIONS)),,$(error VERSIONS is oldest, pinned or newest, not "$(VERSIONS)"))

.PHONY: demo test sweep lint docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	$(BIN)/python -m examples.demo

test: $(if $(OTHERS),$(VENV)/installed,lint)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "not gpu"

sweep: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "not gpu" --sweep
	$(BIN)/python -m tests.random_programs --count 2000 --seed $(SEED) --jobs $(JOBS)
	$(BIN)/python -m tests.opinfo --dtype float32 bfloat16 float16
	$(BIN)/python -m tests.opinfo --errors --seed $(SEED)
	$(BIN)/python -m tests.opinfo --layouts --seed $(SEED)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# Pages are read and not imported: this environment needs no PyTorch.
docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --clean

.venv-docs/installed: constraints-docs.txt pyproject.toml
	rm -rf .venv-docs
	$(PYTHON) -m venv .venv-docs
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])' \
	  | xargs .venv-docs/bin/python -m pip install --quiet -c constraints-docs.txt
	touch $@

clean:
	rm -rf $(VENV) .venv-docs site

# The stamp is written last: an interrupted installation is done again from nothing.
$(VENV)/installed: constraints.txt $(OTHERS) pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed: make PYTHON=python3.12"'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	awk -F== '!seen[$$1]++' $(OTHERS) constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt --no-build-isolation -e '.[dev]'
	touch $@
