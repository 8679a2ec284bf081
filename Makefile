# `make demo` and `make test` do all their own set-up in a virtual environment; the second time they start at once.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint types install bench clean

demo: $(READY)  ## train ResNet-50 in less than half the memory it needs, and prove the numbers
	$(BIN)/overspill train resnet50 --batch 32 --budget 1.2GiB --steps 2 --check

test: $(READY)  ## the whole test suite, on two processes
	$(BIN)/python -m pytest -n 2 --dist worksteal -q

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python bench/cpu_budget.py

install: $(READY)

# The constraints hold for the build of the native core too, each in the name that one or the other pip reads.
$(READY): export PIP_CONSTRAINT = constraints.txt
$(READY): export PIP_BUILD_CONSTRAINT = constraints.txt
$(READY): pyproject.toml constraints.txt $(wildcard native/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[dev,bert]"
	touch $@

clean:
	rm -rf $(VENV) build
