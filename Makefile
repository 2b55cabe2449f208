# `make study` and `make test` need Python >= 3.11, pip, make and a C compiler; everything else they install into .venv.
# vLLM's CPU build needs PyTorch's CPU wheels. Where pip does not find them by itself, name their index:
#   make study PIP_EXTRA_INDEX_URL=<index of PyTorch's CPU wheels>

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/smollm2-135m-instruct
STAMP := $(VENV)/.installed

.PHONY: study test install fmt lint types fast end-to-end docs clean

study: install $(MODEL)
	$(BIN)/tuner run examples/quickstart.yaml

test: install $(MODEL) lint types fast end-to-end

install: $(STAMP)

$(STAMP): requirements/cpu.txt pyproject.toml scripts/finish_install.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || (echo "Python 3.11 or newer is needed: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --requirement requirements/cpu.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(BIN)/python scripts/finish_install.py
	touch $(STAMP)

$(MODEL): | $(STAMP)
	$(BIN)/python scripts/prepare_quickstart_model.py $(MODEL)

fmt:
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types:
	$(BIN)/mypy

fast:
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadfile -m "not end_to_end and not browser" --ignore=tests/end_to_end

end-to-end:
	$(BIN)/pytest -q --durations=12 tests/end_to_end

docs:
	$(BIN)/python scripts/document_study_file.py

clean:
	rm -rf $(VENV) $(MODEL)
