# Two commands for newcomers: `make demo` and `make test`. Both set everything up first, once.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# The stamp carries a checksum of the files that decide what is installed: a change of either sets up anew.
STAMP := $(VENV)/.set-up-$(shell cat pyproject.toml constraints.txt | cksum | tr -d ' ')

.PHONY: demo test check bench soak crash format clean

demo: $(STAMP)  ## show the main job
	$(BIN)/raydispatch demo

test: $(STAMP)  ## run all tests
	$(BIN)/python -m pytest

check: $(STAMP)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## measure everything that the README claims
	$(BIN)/python benchmarks/all.py

soak: $(STAMP)  ## ten million rows in bounded memory, and ten minutes of durable messages
	$(BIN)/python benchmarks/soak.py
	$(BIN)/python benchmarks/soak_delivery.py

crash: $(STAMP)  ## kill it fifty times on each journal, and count
	$(BIN)/python -m tests.crash.crashing --times 50

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "raydispatch needs Python 3.11: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV) (a few minutes, once)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@rm -f $(VENV)/.set-up-*
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
