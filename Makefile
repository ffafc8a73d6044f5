# Two commands for a fresh machine with git, make and Python:
#   make demo   set up and run the main job (convt3d bench --quick)
#   make test   set up and run the test suite
# Both use a virtual environment of their own in .venv.
#   make test-kernels   the cases that make test leaves out, most of them in the emulator
#   make test-full   everything, with real models (MONAI, nnU-Net) and the heavy tests
#   make ledger      tests/ledger.jsonl anew: the machine code of frozen kernels
#   make docs        the documentation, into build/site; a warning is an error
#   make figures     every plot and table of results, anew from docs/results
#   make wheel-check builds sdist and wheel, and uses the wheel on its own
#   make gpu-check   on a machine with a GPU: tests/gpu, then compute-sanitizer over every kernel

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
RUN    := $(VENV)/bin
# Modules are compiled when they are first imported, not all of them when they are installed.
INSTALL := $(RUN)/python -m pip --disable-pip-version-check --quiet install --no-compile
# The NVRTC of the ledger, unless torch brings its own: pip would replace torch, too.
NVRTC   = $(shell $(RUN)/python -c "import torch; print(',nvrtc' * (not torch.version.cuda))")
TEST_ARGS ?=
# Python keeps the modules that it compiles, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-kernels test-full lint types ledger docs figures wheel-check gpu-check clean

demo: $(VENV)/.demo
	$(RUN)/convt3d bench --quick

test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n 2 --dist worksteal -q $(TEST_ARGS)

test-kernels: $(VENV)/.test
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n 2 --dist worksteal -q -m more $(TEST_ARGS)

test-full: $(VENV)/.test-full
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n 2 --dist worksteal -q -m "" $(TEST_ARGS)

lint: $(VENV)/.test
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .

types: $(VENV)/.test
	$(RUN)/mypy

ledger: $(VENV)/.test
	OMP_NUM_THREADS=1 $(RUN)/python tools/ledger.py write

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN)/python -m mkdocs build --quiet

figures: $(VENV)/.test
	$(RUN)/python tools/figures.py

wheel-check: $(VENV)/.test
	$(RUN)/python tools/wheel_check.py

gpu-check: $(VENV)/.test
	PATH="$(CURDIR)/$(RUN):$$PATH" bash tools/gpu_check.sh docs/results/gpu-check.txt

# A torch that the machine already has is used as it is: it is the one with the right CUDA.
$(VENV)/.torch:
	@if $(PYTHON) -c "import torch" 2>/dev/null; \
	then $(PYTHON) -m venv --system-site-packages $(VENV); \
	else $(PYTHON) -m venv $(VENV); fi
	@$(RUN)/python -c "import torch" 2>/dev/null || { echo "installing $(TORCH)"; $(INSTALL) "$(TORCH)"; }
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(INSTALL) -e ".[cli]"
	@touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(INSTALL) -e ".[cu13,dev$(NVRTC)]"
	@touch $@ $(VENV)/.demo

$(VENV)/.docs: $(VENV)/.test
	$(INSTALL) -e ".[docs]"
	@touch $@

# Their dependencies may ask for another torch; it stays the one that is here.
$(VENV)/.test-full: $(VENV)/.test
	$(RUN)/python -c "import torch; print('torch==' + torch.__version__.split('+')[0])" > $(VENV)/torch.txt
	$(INSTALL) -c $(VENV)/torch.txt -e ".[models]"
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
