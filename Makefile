# make alone prints this help. Everything runs in .venv, which `make setup` builds from nothing.
CONFIG ?= configs/stdlib_lm.yaml
NPROC ?= 1
ARGS ?=
KILLS ?= 20
JOBS ?= 2
PYTHON ?= python3
VENV := .venv/bin

# Where: one process or several, on GPUs if there are any.
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c ^GPU)
ifeq ($(GPUS),0)
ACCELERATE ?= accelerate_configs/$(if $(filter 1,$(NPROC)),cpu,cpu_ddp).yaml
else
ACCELERATE ?= accelerate_configs/$(if $(filter 1,$(NPROC)),gpu,ddp).yaml
endif
# A launcher kills its processes 30 s after it was told to stop, and dies of SIGUSR1; a save may take longer, and schedulers
# warn with SIGUSR1. After a restart among several nodes, ranks would find the addresses of the attempt before.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT ?= 120
export PET_SIGNALS_TO_HANDLE ?= SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE ?= 1
LAUNCH = --config_file '$(ACCELERATE)' --num_processes $(NPROC)
# The folder of a run whose YAML and ARGS name none; of a run on several processes another one, so that you can compare both.
OUT = runs/$(basename $(notdir $(CONFIG)))$(if $(filter 1,$(NPROC)),,_$(NPROC)proc)
OUT_GIVEN = $(if $(filter command,$(origin OUT)),--output_dir '$(OUT)')
# RUN=folder, or the run in runs/ that was written to last.
define find_run
run='$(RUN)'; run="$${run:-$$($(VENV)/python -m src.runtime.run_status --newest)}"; \
test -n "$$run" || { echo "error: there is no run in runs/ yet: make train first, or give RUN=folder" >&2; exit 2; }
endef

ifneq ($(word 2,$(CONFIG)),)
$(error CONFIG is '$(CONFIG)': make takes no path with a space; give it to train.py as --config)
endif
ifeq ($(shell printf '%s' '$(NPROC)' | grep -xE '[1-9][0-9]*'),)
$(error NPROC is '$(NPROC)': give the number of processes, 1 or more)
endif

.DEFAULT_GOAL := help
.PHONY: help setup data train eval test test-gpu test-cluster lint format bench report ledger storm clean distclean

help: ## print this help
	@echo "make TARGET [CONFIG=$(CONFIG)] [ACCELERATE=accelerate_configs/X.yaml] [NPROC=$(NPROC)] [ARGS='--flag value …']"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1|/' | column -t -s '|'

setup: .venv/done ## build .venv (1 to 5 GB, some minutes; PYTHON=python3.12 chooses the Python); does nothing when it is up to date

# A .venv whose Python is too old or broken is made again. The last line marks it as complete: what failed before is repeated.
.venv/done: requirements.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) was not found: install Python 3.11 or newer, or name it: make setup PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) src/__init__.py
	@$(VENV)/python src/__init__.py 2>/dev/null || rm -rf .venv
	@echo "Installing the packages of requirements.txt into .venv: 1 to 5 GB to download, some minutes."
	@$(PYTHON) -m venv .venv
	@rm -f $@
	@if [ -t 1 ]; then quiet=; else quiet=--quiet; fi; \
	$(VENV)/python -m pip install $$quiet --disable-pip-version-check -r requirements.txt
	@touch $@
	@echo "Installed: .venv is ready."

train: .venv/done ## train CONFIG; resumes by itself; NPROC=2 uses two processes
	@$(VENV)/python -m src.distributed.run_launcher '$(OUT)' -- $(LAUNCH) train.py --config '$(CONFIG)' $(OUT_GIVEN) $(ARGS)

data: .venv/done ## fetch and prepare the data of CONFIG, without training; on a machine without a GPU if you like
	@$(VENV)/python -m src.data.dataset --config '$(CONFIG)' $(ARGS)

eval: .venv/done ## evaluate the last run (RUN=folder for another one)
	@$(VENV)/python -m src.distributed.run_launcher -- $(LAUNCH) eval.py $(if $(RUN),--checkpoint '$(RUN)') $(ARGS)

test: .venv/done ## prove the guarantees (ARGS='-m conformance' after editing a task)
	$(VENV)/python -m pytest -n $(JOBS) --dist loadfile -m "not cluster" $(ARGS)

test-gpu: .venv/done ## prove what only a GPU can show, on a machine with one
	$(VENV)/python -m pytest tests/gpu -v $(ARGS)

test-cluster: .venv/done ## prove FSDP2, HSDP, ZeRO, two nodes and a real Slurm; skips what is not installed
	$(VENV)/python -m pytest -n $(JOBS) --dist loadfile -m cluster $(ARGS)

lint: .venv/done ## check style and formatting
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .

format: .venv/done ## mend style and formatting
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

bench: .venv/done ## measure the loop against a plain one, side by side
	$(VENV)/python benchmarks/loop.py $(ARGS)

report: .venv/done ## write report.html of the last run (RUN=folder for another one)
	@$(find_run); $(VENV)/python -m src.reporting.html_report "$$run"

ledger: .venv/done ## did RUN train on what its plan says, or (OTHER=folder) on what another run did?
	@$(find_run); $(VENV)/python -m src.reporting.ledger "$$run" $(if $(OTHER),'$(OTHER)')

storm: .venv/done ## kill a run of CONFIG at random moments, again and again (KILLS=20), and compare it with an undisturbed one
	$(VENV)/python -m tests.helpers.kill_storm --config $(CONFIG) --kills $(KILLS) --nproc $(NPROC) $(ARGS)

clean: ## remove caches of tools (not .venv, data/, runs/, nor prepared data, which is in the cache of datasets)
	rm -rf .pytest_cache .ruff_cache
	find . \( -path ./.venv -o -path ./data -o -path ./runs -o -path ./.git \) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv, which make setup builds again
	rm -rf .venv
