# mpiring's two commands, and the rest: `make help`.

MPI ?= openmpi
NP ?= 8
BENCH ?=
PYTHON ?= python3
RANKS = 1 2 3 4 5 8
TORCH_RANKS = 1 2 3 4
DRAW = 100

# One environment a library, for their launchers clash. BIN is absolute: Intel's mpirun looks for its parts on PATH.
ENV := $(CURDIR)/.venv/$(MPI)
BIN := $(ENV)/bin
MPIRUN = PATH="$(BIN):$$PATH" mpirun

# Open MPI: run as root too, with more ranks than cores, and let ranks that wait give way; no complaint about a missing UCX.
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export PRTE_MCA_rmaps_default_mapping_policy = :oversubscribe
export OMPI_MCA_mpi_yield_when_idle = 1
export OMPI_MCA_osc = ^ucx
# MPICH and Intel MPI: let ranks that wait give way.
export MPIR_CVAR_POLLS_BEFORE_YIELD = 1
export I_MPI_SPIN_COUNT = 1
export I_MPI_THREAD_YIELD = 2
# The environments must not read what the caller's Python adds.
unexport PYTHONPATH PYTHONHOME

ifeq ($(filter openmpi mpich impi,$(MPI)),)
$(error MPI=$(MPI) is not one of openmpi, mpich, impi)
endif
ifneq ($(words $(CURDIR)),1)
$(error make cannot work in a folder with a space in its path: $(CURDIR))
endif

.DEFAULT_GOAL := help
.PHONY: help bench test tests-alone test-torch soak prove lint clean

help: ## list the targets (this)
	@awk -F ':.*## ' '/^[a-z%N-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  MPI=openmpi|mpich|impi picks the MPI library (now $(MPI)), NP= the ranks of bench (now $(NP)),'
	@echo '  BENCH="-b 1M -e 64M" adds bench options, PYTHON= the interpreter of new environments.'

bench: $(ENV)/.run ## compare ring, tree and the MPI library's own allreduce on 8 ranks
	$(MPIRUN) -np $(NP) $(BIN)/python -m mpiring.bench $(BENCH)

test: tests-alone ## run all tests; the MPI tests at 1, 2, 3, 4, 5 and 8 ranks
	@for ranks in $(RANKS); do $(MAKE) --no-print-directory test-$$ranks || exit 1; done
	$(MPIRUN) -np 3 $(BIN)/python -m pytest -q tests/gpu
	@$(MAKE) --no-print-directory test-torch

# Programs that start mpirun themselves run in a process of their own, which has not started MPI.
tests-alone: $(ENV)/.test
	$(BIN)/python -m pytest -q tests/pure tests/threads
	PATH="$(BIN):$$PATH" $(BIN)/python -m pytest -q tests/launch tests/cluster

test-N: ## run the MPI tests on N ranks, as in make test-4
	@echo 'Give a number of ranks: make test-4'; exit 2

test-torch: $(ENV)/.test ## run the tests of mpiring.torch at 1 to 4 ranks (part of make test), where PyTorch is installed
	@$(BIN)/python -c 'import torch' 2>/dev/null || { echo \
	  "tests/pytorch is left out: PyTorch is not installed ($(BIN)/python -m pip install torch)"; exit 0; }; \
	for ranks in $(TORCH_RANKS); do $(MPIRUN) -np $$ranks $(BIN)/python -m pytest -q tests/pytorch || exit 1; done

test-%: $(ENV)/.test
	$(MPIRUN) -np $* $(BIN)/python -m pytest -q tests/mpi

soak: $(ENV)/.test ## run random programs on the engine for ten minutes, on NP ranks (make test: for 30 seconds)
	MPIRING_RANDOM_SECONDS=600 $(MPIRUN) -np $(NP) $(BIN)/python -m pytest -q tests/mpi/test_engine_random.py

prove: $(ENV)/.run ## prove every algorithm for DRAW=100 numbers of ranks drawn from 65 to 1024 (make test: 1 to 64)
	$(BIN)/python -m mpiring verify --all --ranks 65 --draw $(DRAW) --jobs 2

lint: $(ENV)/.lint ## check style and types' syntax with ruff
	$(BIN)/ruff check .

clean: ## remove environments and caches
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(ENV)/.run: setup.cfg
	$(PYTHON) -m venv $(ENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[$(MPI),plot]'
	@touch $@

$(ENV)/.test: $(ENV)/.run
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[$(MPI),test,plot,examples]'
	@touch $@

$(ENV)/.lint: $(ENV)/.run
	$(BIN)/python -m pip install -q --disable-pip-version-check ruff
	@touch $@
