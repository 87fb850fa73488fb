# Everything happens in .venv; the stamp file says that it is complete. PIP_CONSTRAINT also holds for what builds the package.
# Not compiled ahead, pip takes half the time: of all modules there, few are ever imported.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test test-gpu test-kernels lint format types check bench bench-gpu torture fuzz nightly audit results clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once, a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --no-compile --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/fedu2 train --report

# One worker more than two cores have: tests of processes wait for much of their time.
test: $(READY)
	$(BIN)/python -m pytest -n 3 --dist worksteal

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu tests

# The kernels in Triton's interpreter, which needs no GPU.
test-kernels:
	@$(BIN)/python -c "import triton" 2>/dev/null || { echo "test-kernels needs Triton, and NumPy < 2.4, in $(VENV)"; exit 1; }
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 -m gpu tests

lint: $(READY)
	$(BIN)/ruff check .

format: $(READY)
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

check: lint format types test

bench: $(READY)
	$(BIN)/python -m benchmarks

bench-gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu

# The crash matrix: kills, damaged files, a full disk, read-only directories, a second process. SEED=7 make torture draws others.
torture: $(READY)
	$(BIN)/python -m torture --kills 200 --seed $${SEED:-0}

# Hostile input for everything that reads a file or a message. Three minutes.
fuzz: $(READY)
	$(BIN)/python -m fuzz --inputs $${INPUTS:-50000} --seed $${SEED:-0}

# Both, as a record: results/nightly/. Commit what you measured, and nothing else.
nightly: $(READY)
	@mkdir -p results/nightly
	@for what in torture fuzz; do \
	    { echo "commit $$(git describe --always --dirty --exclude='*'), $$(date -u +%F), $$(nproc) cores, $$($(BIN)/python --version), make $$what SEED=$${SEED:-0}"; echo; \
	      $(MAKE) --no-print-directory $$what; } > results/nightly/$$what.txt; status=$$?; cat results/nightly/$$what.txt; \
	    [ $$status = 0 ] || exit $$status; done

# Known flaws in what we depend on (asks PyPI), and habits that invite some of our own; SECURITY.md explains exceptions.
audit: $(READY)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --editable '.[audit]'
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive src
	$(BIN)/bandit --quiet --configfile pyproject.toml --skip B101,B311,B404,B603,B607 --recursive benchmarks tools
	$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip

# What the records say: docs/results.md, the table in README.md, recipes/.
results: $(READY)
	$(BIN)/python tools/publish.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
