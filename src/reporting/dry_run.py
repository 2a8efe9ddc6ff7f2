"""Checks of `--dry_run`: what a run would refuse between its data and its first step, without a process group.

docs/troubleshooting.md lists what only the run itself can check. Tests: tests/config/test_dry_run.py.
"""

import inspect
import sys
from contextlib import redirect_stderr
from io import StringIO

import torch

from src.checkpointing.checkpoint_list import list_checkpoints
from src.checkpointing.locate_weights import init_weights
from src.config.errors import warn
from src.config.schema import RunConfig
from src.distributed import strategy_checks
from src.distributed.init_accelerator import check_trackers
from src.distributed.planned_strategy import planned_strategy
from src.models.compile_and_recompute import check_recompute
from src.tasks import Task
from src.training.optimizers import make_optimizer
from src.training.step import ModelWithLoss
from src.training.technique_chain import TechniqueChain
from src.training.techniques.base import Run
from src.training.train_state import TrainState
from src.training.trial_evaluation import check_best_metric
from src.training.trial_loss import check_trial_loss

BUILT = 1e9  # parameters of a model that gets its weights; more may not fit into this machine


def checked_model(cfg: RunConfig, task: Task, datasets: dict, num_steps: int) -> ModelWithLoss:
    """Return the model of a run, on the CPU, changed and frozen as the run file says.

    Raise UsageError, with the sentence of the run, for what the run would refuse before its first step."""
    check_trackers(cfg.report_to)
    strategy, techniques = planned_strategy(cfg), TechniqueChain(cfg)
    model, parameters = _build(cfg, task)
    if parameters <= BUILT:
        check_trial_loss(model, task, datasets["train"])
    module = ModelWithLoss(model, task)
    techniques.change_model(module, cfg)
    check_recompute(model, cfg)
    optimizer = make_optimizer(cfg, module, fused=False)
    strategy_checks.check_model(strategy, module)
    strategy_checks.check_groups(module, optimizer)
    if strategy.accelerator.distributed_type.value == "FSDP":
        strategy_checks.check_shardable(model, strategy.name)
    state = TrainState()
    techniques.check(Run(cfg, strategy, strategy.hosts, task, module, module, optimizer, num_steps, state))
    check_best_metric(cfg, datasets.get("validation"), module, has_weights=parameters <= BUILT)
    return module


def _build(cfg: RunConfig, task: Task) -> tuple[torch.nn.Module, int]:
    """Return (model, number of its parameters); with more than BUILT, these have no values, and take no memory."""
    resumes = cfg.resume == "auto" and list_checkpoints(cfg.output_dir)  # then `init_from` is not read
    found = None if resumes else init_weights(cfg)
    weights = str(found) if found else None
    empty = "empty" in inspect.signature(task.build).parameters  # only sharded runs of a fork need it
    with redirect_stderr(StringIO()) as warnings:
        model = task.build_model(empty=True) if empty else task.build_model(weights)
    parameters = sum(p.numel() for p in model.parameters())
    if parameters <= BUILT and empty:
        return task.build_model(weights), parameters
    print(warnings.getvalue(), end="", file=sys.stderr)
    if parameters > BUILT:
        warn(
            f"the model has {parameters:,} parameters, too many for a dry run to make or read them: the run checks them "
            "and its first loss"
        )
    return model, parameters
