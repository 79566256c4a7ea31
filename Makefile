# Both targets set themselves up on a fresh machine that has Python 3.11 or newer.
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
QUICKSTART ?= runs/quickstart
# What both targets install; with libtpu beside it JAX would look for a TPU first, and complain.
export JAX_PLATFORMS ?= cpu

.PHONY: quickstart test lint clean

quickstart: $(BIN)/.core
	$(BIN)/python -m jaxdec --config=configs/quickstart.py --workdir=$(QUICKSTART)
	@echo "plots: $(QUICKSTART)/plots   curves: pip install tensorboard && tensorboard --logdir $(QUICKSTART)"

test: lint
	$(BIN)/python -m pytest -q -n auto --nbmake

lint: $(BIN)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed; set PYTHON=..."; exit 2; }
	$(PYTHON) -m venv $(VENV)

# The constraints hold the versions that were tested; other Pythons take what pyproject.toml allows.
$(BIN)/.core $(BIN)/.dev: $(BIN)/python pyproject.toml $(wildcard constraints/*.txt)
	tested=constraints/$$($(BIN)/python -c 'import sys; print("py%d%d.txt" % sys.version_info[:2])'); \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		$$(test -f $$tested && echo "-c $$tested") -e '.$(if $(filter %.dev,$@),[dev])'
	touch $@
