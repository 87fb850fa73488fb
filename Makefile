# Everything happens in .venv; the stamp file says that it is complete.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test test-gpu test-kernels lint format types check bench bench-gpu clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once, a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/fedu2 train --report

test: $(READY)
	$(BIN)/python -m pytest -n 2

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

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
