# Two commands do all the set-up: `make quickstart` runs the main job, `make test` passes the tests.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: quickstart test lint types install clean

quickstart: $(STAMP)
	$(BIN)/python tools/quickstart.py

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy spa_dist data_pipeline

install: $(STAMP)

$(STAMP): setup.py constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

clean:
	rm -rf .venv build *.egg-info runs
