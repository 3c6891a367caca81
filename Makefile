# `make train` and `make test` need Python 3.11 or newer, make, g++ and a package registry; the rest is installed here.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
# Two more than two cores: tests wait for processes and timeouts. One file is tested without: `pytest FILE`.
VERSIONS := lowest newest
WORKERS := --numprocesses 4 --dist worksteal
# Tests start hundreds of processes; without bytecode each compiles the source again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help train test test-all test-nightly test-bounds chaos plant check docs bench bench-quick gpu rehearse-gpu fake-gpu dist clean

help:
	@echo "make train      fine-tune the sample BERT, on the GPUs of this machine or on two CPU processes"
	@echo "make test       run the quick tests"
	@echo "make test-all   run all tests but those of make test-nightly"
	@echo "make test-nightly  run tests with further values of parameters"
	@echo "make test-bounds  run the sample and the parity rows with the lowest and the newest versions of all packages"
	@echo "make chaos      disturb 500 tiny trainings by kills, failing calls and damaged files; an hour or more on two cores"
	@echo "make plant      plant defects into copies of the source, and show which test catches each"
	@echo "make check      run ruff, mypy and the import contract (import-linter)"
	@echo "make docs       build the documentation as a site, in site/"
	@echo "make bench      compare the speed with a hand-written loop and other tools, on CPUs"
	@echo "make bench-quick  compare the speed for the smallest model only, in a minute"
	@echo "make gpu        measure one GPU in nine minutes, then check it in nine more"
	@echo "make fake-gpu   rehearse the measurements, and run steps on fake CUDA tensors, without a GPU; installs 6 GB once"
	@echo "make dist       build the package into dist/, and train the sample with its wheel in a fresh environment"
	@echo "make clean      remove all built files; runs/ stays"

# the largest power of two, because the sample's batch divides by it
train: $(INSTALLED)
	@processes=$$($(BIN)/python -c 'import torch; print(1 << (torch.cuda.device_count() or 2).bit_length() - 1)') && \
	$(BIN)/trainer run recipes/bert_sample.json --processes $$processes

test: $(INSTALLED)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(WORKERS) -m "not slow and not nightly"

# Few failures are run again alone, and the second run decides: see tests/helpers/second_look.py.
test-all: $(INSTALLED)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.helpers.second_look $(WORKERS) -m "not nightly"

test-nightly: $(INSTALLED)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.helpers.second_look $(WORKERS) -m nightly

test-bounds:
	for versions in $(VERSIONS); do PYTHON=$(PYTHON) .ci/bounds $$versions || exit; done

chaos: $(INSTALLED)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.chaos --cases 500 --workers 2 --report chaos.jsonl

plant: $(INSTALLED)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.planted

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_floors.py -k "names_no or know_their"

bench: $(INSTALLED)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.benchmarks.throughput --models small minilm base --precisions fp32 bf16 \
	  --rounds 10 --steps 2 --json bench.json
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.benchmarks.throughput --models small \
	  --tasks tags questions choices "masked words" --further "without padding" --rounds 10 --steps 2
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.benchmarks.throughput --models small minilm --keys data.pad_to=32 \
	  --further compiled --warm-up 8 --rounds 10 --steps 2
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.benchmarks.throughput --models small minilm --processes 1 --defaults \
	  --further "without padding" "rows in random order" "rows in random order, without padding" --rounds 3 --steps 12

bench-quick: $(INSTALLED)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.benchmarks.throughput --models small --processes 1 --rounds 20 --steps 4

gpu: $(INSTALLED)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.benchmarks.gpu --plan-only --json plans.json
	@status=0; export HF_HUB_OFFLINE=1; \
	$(BIN)/python -m tests.benchmarks.first_gpu --plans plans.json || status=1; \
	$(BIN)/python -m tests.benchmarks.first_gpu --checks --out first_gpu_checks || status=1; exit $$status

rehearse-gpu: $(INSTALLED)
	rm -rf .fakegpu/rehearsal
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.benchmarks.first_gpu --tiny --minutes 30 --out .fakegpu/rehearsal
	cat .fakegpu/rehearsal/budget.txt

fake-gpu: rehearse-gpu .fakegpu/libcuda.so.1
	FAKE_DRIVER=$(CURDIR)/$< LD_PRELOAD=$(CURDIR)/$< LD_LIBRARY_PATH=$(CURDIR)/.fakegpu HF_HUB_OFFLINE=1 \
	  .fakegpu/venv/bin/python -m pytest tests/gpu/fake

# The wheel of torch in PyPI is the build for CUDA.
.fakegpu/libcuda.so.1: tests/gpu/fake/no_driver.c constraints.txt
	DEVICE=cuda TORCH_INDEX_URL=default HASHES=none EXTRAS="deepspeed lora quantization schedule-free dev" \
	  PYTHON=$(PYTHON) docker/install.sh dependencies .fakegpu/venv
	@.fakegpu/venv/bin/python -c 'import sys, torch; sys.exit(not torch.version.cuda)' || { \
		echo "torch must be a build for CUDA; let pip find no CPU wheel (PIP_FIND_LINKS), remove .fakegpu, and start again" >&2; exit 1; }
	gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o $@ $<

dist:
	PYTHON=$(PYTHON) .ci/dist

docs: $(INSTALLED)
	$(BIN)/python -m docs.site
	@echo "read it at http://127.0.0.1:8000: $(BIN)/python -m http.server --directory site --bind 127.0.0.1"

# Without bytecode: pip would compile 24,000 modules, but a run imports a quarter of them, and its first one stores theirs.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(NEW_ENOUGH)' 2>/dev/null || { \
		echo "$(PYTHON) is missing or older than Python 3.11; name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
		exit 1; }
	@echo "installing into $(VENV), once; this takes some minutes"
	@$(BIN)/python -c '$(NEW_ENOUGH)' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[audit,deepspeed,excel,lora,quantization,schedule-free,generation,mining,onnx,search,tensorboard,wandb,mlflow,docs,dev]'
	@touch $@

clean:
	rm -rf $(VENV) .fakegpu build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
