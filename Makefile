# make demo     train a small GPT on one device and on 8 ranks, and compare (ARGS="--data FILE --steps N" for your own)
# make test     the tests          make lint    ruff and mypy
# make docs     the documentation as a site, in site/index.html; a broken link fails
# make bench    the benchmarks     make clean   remove what was made, .venv included
# make gpu      all that a GPU can show, in nine minutes, installing nothing (ARGS="--minutes 20 --resume"); toy sizes without one
# make install  .venv with everything; the other targets call it. Again it does nothing, unless what to install changed.

PYTHON ?= python3
# A pip index that serves CPU builds of torch. Empty: pip's own settings decide, and Linux may get a CUDA build (larger, works too).
TORCH_INDEX ?=
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed
SOURCES := autoptd examples tests benchmarks
# Not models.py, which verifies the ecosystem's models for hours, nor families.py, which is what it reads.
BENCHMARKS := $(filter-out benchmarks/models.py benchmarks/families.py,$(wildcard benchmarks/*.py))
export OMP_NUM_THREADS ?= 1
# Without byte code on disk every process compiles what it imports once more, for seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test lint docs bench gpu clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "AutoPTD needs Python 3.11 or newer: make install PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy autoptd examples

docs: $(INSTALLED)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	$(BIN)/python docs/make_site.py

bench: $(INSTALLED)
	@for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu --minutes 9 --out out/gpu $(ARGS)

clean:
	rm -rf .venv out build site dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find autoptd examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
