# Targets of the engine, included by the Makefile. Everything runs in .venv, which `make setup` builds from nothing.
VENV := .venv/bin

# The accelerate file: for one process or several, on GPUs if there are any.
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c ^GPU)
ifeq ($(GPUS),0)
ACCELERATE ?= accelerate_configs/$(if $(filter 1,$(NPROC)),cpu,cpu_ddp).yaml
else
ACCELERATE ?= accelerate_configs/$(if $(filter 1,$(NPROC)),gpu,ddp).yaml
endif
# By default torchrun kills its processes 30 s after a signal, but a save may take longer; it dies of SIGUSR1, with which
# schedulers warn; it handles SIGHUP even under nohup; and after a restart on several nodes, ranks connect to addresses
# of the previous attempt.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT ?= 120
export PET_SIGNALS_TO_HANDLE ?= SIGTERM,SIGINT,SIGQUIT,SIGUSR1
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE ?= 1
LAUNCH = $(VENV)/accelerate launch --quiet --config_file '$(ACCELERATE)' --num_processes $(NPROC) $(THREADS)
# On a CPU, each process gets its share of the cores; accelerate would take the same number and warn.
CORES = $(shell lscpu --parse=CORE,SOCKET 2>/dev/null | grep -v '^\#' | sort -u | wc -l)
SHARE = $(shell echo $$(( $(CORES) / $(NPROC) )))
USES_CPU = $(shell grep -s '^use_cpu: true' '$(ACCELERATE)')
THREADS = $(if $(OMP_NUM_THREADS),,$(if $(USES_CPU),$(if $(filter-out 0,$(SHARE)),--num_cpu_threads_per_process $(SHARE))))
# Without OUT and a folder in YAML or ARGS, train.py chooses runs/ and the name of CONFIG; another configuration than that
# of the run there gets a new folder.
OUT_FLAG = $(if $(filter command,$(origin OUT)),--output_dir '$(OUT)')
# RUN=folder, else the run in runs/ that was last written to.
define find_run
run='$(RUN)'; run="$${run:-$$($(VENV)/python -m engine.process.run_status --newest)}"; \
test -n "$$run" || { echo "error: there is no run in runs/ yet: make train first, or give RUN=folder" >&2; exit 2; }
endef

# A value as one word of the shell.
quoted = '$(subst ','\'',$(1))'

# Ends with one sentence if the tool is not here. make fork reads what a target needs.
need = test -e $(1) || { echo "error: $(1) is not here: restore it to use make $@" >&2; exit 2; };

# make ignores a variable that it does not know.
$(foreach name,accelerate args config file nproc out run runs seed segments,$(if $(filter command,$(origin $(name))),$(error \
$(name)=$($(name)) is in small letters: give $(shell printf '%s' '$(name)' | tr a-z A-Z)=$($(name)))))

ifneq ($(word 2,$(CONFIG)),)
$(error CONFIG is '$(CONFIG)': make cannot handle a path with a space; give it to train.py as --config)
endif
ifeq ($(shell printf '%s' '$(NPROC)' | grep -xE '[1-9][0-9]*'),)
$(error NPROC is '$(NPROC)': give the number of processes, 1 or more)
endif

.DEFAULT_GOAL := help
.PHONY: help setup data smoke preview find-lr find-batch-size train eval chat predict test test-addons test-fast test-gpu test-cluster lint format map report ledger storm same audit fork update schema clean distclean

help: ## print this help
	@echo "make TARGET [CONFIG=$(CONFIG)] [ACCELERATE=accelerate_configs/X.yaml] [NPROC=$(NPROC)] [OUT=runs/X] [ARGS='--flag value …']"
	@grep -hE '^[a-z-]+:.*## ' engine/make.mk Makefile | sed -E 's/^([a-z-]+):.*## /  \1|/' | column -t -s '|'

setup: .venv/done ## build .venv (1 to 5 GB, some minutes; PYTHON=python3.12 chooses the Python)

# Replaces a .venv whose Python is too old or broken. The file `done`, written last, marks it as complete. A linked .venv
# belongs to another copy, which keeps it up to date.
.venv/done: $(if $(shell test -L .venv && echo link),,requirements.txt)
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) was not found: install Python 3.11 or newer, or name it: make setup PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) engine/startup.py
	@$(VENV)/python engine/startup.py 2>/dev/null || rm -rf .venv
	@echo "Installing the packages of requirements.txt into .venv: 1 to 5 GB to download, some minutes."
	@$(PYTHON) -m venv .venv
	@rm -f $@
	@if [ -t 1 ]; then quiet=; else quiet=--quiet; fi; \
	$(VENV)/python -m pip install $$quiet --disable-pip-version-check -r requirements.txt
	@touch $@
	@echo "Installed: .venv is ready."

train: export STOP_IS_SUCCESS := 1
train: .venv/done ## train CONFIG, or resume it; NPROC=2 uses two processes
	$(LAUNCH) train.py --config '$(CONFIG)' $(OUT_FLAG) $(ARGS)

smoke: .venv/done ## try CONFIG in a minute: checks of the task, three steps, an evaluation, saves and a resume, compared
	$(VENV)/python -m engine.tools.smoke $(LAUNCH) train.py --config '$(CONFIG)' $(OUT_FLAG) $(ARGS)

data: .venv/done ## download and prepare the data of CONFIG without training (no GPU needed)
	@$(VENV)/python -m engine.plan.dataset --config '$(CONFIG)' $(ARGS)

preview: .venv/done ## show the first rows of CONFIG, the tokens that are trained on in color; ARGS='--page preview.html'
	@$(call need,addons/tools/preview.py) $(VENV)/python -m addons.tools.preview --config '$(CONFIG)' $(ARGS)

find-lr: .venv/done ## suggest a learning rate for CONFIG; ARGS='--curve lr.json' writes the curve
	@$(call need,addons/tools/find_lr.py)
	$(LAUNCH) --module addons.tools.find_lr --config '$(CONFIG)' $(ARGS)

find-batch-size: .venv/done ## print the largest per_device_batch_size of CONFIG that fits in memory (needs a GPU)
	@$(call need,addons/tools/find_batch_size.py)
	$(LAUNCH) --module addons.tools.find_batch_size --config '$(CONFIG)' $(ARGS)

eval: .venv/done ## evaluate the newest run, or RUN=folder
	$(LAUNCH) eval.py $(if $(RUN),--checkpoint '$(RUN)') $(ARGS)

chat: .venv/done ## chat with the newest run, or RUN=folder, in the terminal; ARGS='--temperature 0.7'
	@$(call need,addons/tools/chat.py) $(VENV)/python -m addons.tools.chat $(if $(RUN),--checkpoint '$(RUN)') $(ARGS)

predict: .venv/done ## answer the rows of FILE=rows.jsonl by the newest run, or RUN=folder; NPROC=2 uses two processes
	@test -n $(call quoted,$(FILE)) || { echo "error: give FILE=rows.jsonl" >&2; exit 2; }
	@$(call need,addons/tools/predict.py)
	$(LAUNCH) --module addons.tools.predict $(if $(RUN),--checkpoint '$(RUN)') --file $(call quoted,$(FILE)) $(ARGS)

test-fast: .venv/done ## test while you edit: two minutes, few processes
	$(VENV)/python -m pytest -n $(JOBS) --dist loadfile -m "not cluster" --fast -q -r fE $(ARGS)

test: .venv/done ## test every guarantee of the core (ARGS='-m conformance' after editing a task)
	$(VENV)/python -m pytest -n $(JOBS) --dist loadfile -m "not cluster" --ignore tests/addons $(ARGS)

test-addons: .venv/done ## test the add-ons: all, or with ARGS=tests/addons/tasks one room
	@$(call need,tests/addons)
	$(VENV)/python -m pytest -n $(JOBS) --dist loadfile -m "not cluster" $(if $(filter tests/%,$(ARGS)),,tests/addons) $(ARGS)

test-gpu: .venv/done ## test what needs a GPU
	$(VENV)/python -m pytest tests/gpu -n 4 -v -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true $(ARGS)

test-cluster: .venv/done ## test core and add-ons on FSDP2, HSDP, ZeRO, two nodes, launchers, a real Slurm, extra packages, slow runs; skips what is not installed
	$(VENV)/python -m pytest -n $(JOBS) --dist loadfile -m cluster $(ARGS)

map: .venv/done ## print what each file holds, by its first line
	@$(VENV)/python -m engine.tools.map

lint: .venv/done ## check style and formatting
	@failed=0; for tool in 'ruff check .' 'ruff format --check .' 'pyrefly check'; do \
	echo "$(VENV)/$$tool"; $(VENV)/$$tool || failed=1; done; exit $$failed

format: .venv/done ## fix style and formatting
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

report: .venv/done ## write report.html of the newest run, or RUN=folder; RUNS='folder folder' compares runs
	@$(if $(RUNS),,$(find_run);) $(call need,addons/tools/html_report.py) $(VENV)/python -m addons.tools.html_report $(or $(RUNS),"$$run")

ledger: .venv/done ## check that RUN trained on the data of its plan, or of OTHER=folder
	@$(find_run); $(call need,addons/tools/ledger.py) $(VENV)/python -m addons.tools.ledger "$$run" $(if $(OTHER),'$(OTHER)')

storm: .venv/done ## kill and resume a run of CONFIG KILLS=20 times, then compare it with an undisturbed run
	@$(call need,addons/tools/kill_storm.py)
	$(VENV)/python -m addons.tools.kill_storm --config $(CONFIG) --kills $(KILLS) --nproc $(NPROC) $(ARGS)

same: .venv/done ## compare the numbers of this folder with those of the commit BASE, or RUNS='folder folder', bitwise
	@test -n '$(BASE)$(RUNS)' || { echo "error: give BASE=commit, or RUNS='folder folder'" >&2; exit 2; }
	@$(call need,addons/tools/same.py) $(VENV)/python -m addons.tools.same $(or $(RUNS),'$(BASE)') $(ARGS)

audit: .venv/done ## train SEGMENTS=3 intervals (or all) between the checkpoints of RUN again, and compare; SEED=number
	@$(find_run); $(call need,addons/tools/audit.py) $(VENV)/python -m addons.tools.audit --segments '$(or $(SEGMENTS),3)' \
	$(if $(SEED),--seed '$(SEED)') "$$run" $(LAUNCH) train.py $(ARGS)

fork: .venv/done ## copy the template to DEST=folder [TASKS="seq2seq …"] [ADDONS="techniques …", or none] [NAME=…], no other add-ons
	@test -n '$(DEST)' || { echo "error: give DEST=folder" >&2; exit 2; }
	@$(call need,addons/tools/fork.py) $(VENV)/python -m addons.tools.fork '$(DEST)' --tasks $(TASKS) --addons $(ADDONS) --name '$(NAME)'

update: .venv/done ## bring the engine up to date with FROM=folder or git address [REF=tag] [SINCE=commit]; your files stay
	@test -n $(call quoted,$(FROM)) || { echo "error: give FROM=folder or git address of the template [REF=tag]" >&2; exit 2; }
	@$(VENV)/python -m engine.tools.update $(call quoted,$(FROM)) $(if $(REF),--ref $(call quoted,$(REF))) $(if $(SINCE),--since $(call quoted,$(SINCE))) $(if $(COPY),--copy $(call quoted,$(COPY)))

schema: .venv/done ## write configs/schema.json, which editors and --help read, after you changed a field
	$(VENV)/python train.py --schema >configs/schema.json.tmp || { rm configs/schema.json.tmp; exit 1; }
	mv configs/schema.json.tmp configs/schema.json

clean: ## remove caches of tools; keeps .venv, data/, runs/ and prepared data
	rm -rf .pytest_cache .ruff_cache
	find . \( -path ./.venv -o -path ./data -o -path ./runs -o -path ./.git \) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	rm -rf .venv
