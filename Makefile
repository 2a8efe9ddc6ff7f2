# make alone prints the targets. Defaults and targets of your own stand here; those in engine/make.mk are of the engine,
# and `make update` brings them up to date.
CONFIG ?= configs/stdlib_lm.yaml
NPROC ?= 1
ARGS ?=
KILLS ?= 20
JOBS ?= 2
PYTHON ?= python3

include engine/make.mk

.PHONY: bench bench-gpu lock

bench: .venv/done ## measure the loop against a plain loop, and the preparation of rows
	$(VENV)/python benchmarks/loop.py $(ARGS)
	$(VENV)/python benchmarks/preparation.py

bench-gpu: .venv/done ## measure train.py on this GPU against a plain compiled loop and the Trainer; CASES='124m 1b'
	$(VENV)/python benchmarks/gpu.py $(CASES) $(ARGS)

lock: .venv/done ## take the newest versions that pyproject.toml allows into uv.lock and requirements*.txt (needs uv)
	$(VENV)/python .ci/lock.py
