# `make demo`: own environment, install, train on the built-in corpus. `make test`: own environment, install, test.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

.PHONY: demo test lint clean

# torch is installed first and by its exact version: where pip finds a CPU build of it, it takes that one, and the
# open range of the package is satisfied already.
$(STAMP): setup.cfg setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --editable ".[test]" --constraint constraints.txt
	touch $(STAMP)

# accelerate gives a process one thread unless it is told otherwise.
demo: $(STAMP)
	$(BIN)/accelerate launch --num_cpu_threads_per_process $$($(BIN)/python -c "import os; print(os.cpu_count())") \
		--num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		examples/run_vascl.py --overwrite_output_dir

test: $(STAMP) lint
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) vascl-demo build *.egg-info
