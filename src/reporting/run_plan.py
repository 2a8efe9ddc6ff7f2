"""The plan printed by `--dry_run` and at the start: steps, tokens, learning rate, memory, disk.

Tests: tests/config/test_command_line.py, tests/config/test_dry_run.py.
"""

import inspect
import math
from collections.abc import Callable
from pathlib import Path

import torch

from src.config.addons import functions_of_addons
from src.config.schema import RunConfig
from src.data.batch_plan import sizes_of_run
from src.data.prepared_split import data_notes, format_stats
from src.models import memory_estimate
from src.runtime.console import table
from src.tasks import Task
from src.training.optimizers import describe_groups, make_optimizer
from src.training.schedules import make_schedule, total_steps, warmup_updates
from src.training.step import ModelWithLoss
from src.training.techniques import Techniques, make_techniques

FEW_STEPS = 10  # of an epoch: fewer are warned of


def plan_table(
    cfg: RunConfig,
    splits: dict,
    module: ModelWithLoss,
    techniques: Techniques,
    schedule: Callable[[int], float],
    total: int,
) -> dict[str, str]:
    """Return the plan as {name: text}: data, steps, learning rate, parameters, and the memory and disk needed."""
    train, model = splits["train"], module.model
    parameters, trainable = memory_estimate.count_parameters(model)
    rows = {"task": cfg.task, "training data": format_stats(train.stats, module.task.unit)}
    if train.quotas:
        rows["mixture"] = _mixture(train)
    if "validation" in splits:
        rows["evaluation data"] = format_stats(splits["validation"].stats, module.task.unit)
    else:
        rows["evaluation data"] = "none: no evaluation"
    rows |= _length(cfg, train, total, module.task.unit)
    for plan_rows in functions_of_addons(cfg, "plan_rows"):
        rows |= plan_rows(cfg, module.task, train, total, rows)
    rows["learning rate"] = _learning_rates(cfg, schedule, total)
    rows["parameters"] = f"{parameters:,} ({trainable:,} trainable) in {cfg.dtype}"
    if groups := describe_groups(model, cfg):
        rows["parameter groups"] = groups
    rows |= techniques.plan()
    rows["memory"] = memory_estimate.describe_memory(cfg, model, _size, techniques.copies_in_step)
    saved, _ = memory_estimate.count_parameters(module.task.saved(model))  # without a frozen teacher
    disk = _disk_bytes(cfg, saved, trainable, total, techniques.copies)
    rows["disk"] = f"{_size(disk)} for checkpoints and the final model in {cfg.output_dir}"
    return rows


def _mixture(train) -> str:
    """Format the number of rows that an epoch draws from each source."""
    names = [name for name, *_ in train.segments()]
    return "; ".join(
        f"{name}: {draws:,} of {size:,} rows per epoch" for name, (size, draws) in zip(names, train.quotas, strict=True)
    )


def _length(cfg: RunConfig, train, total: int, unit: str) -> dict[str, str]:
    """Return the length of the run in steps, epochs and tokens (or what `unit` names)."""
    batch = cfg.global_batch_size
    steps = f"{total:,} of {batch} examples"
    if train.stats["examples"] is None:  # a stream
        return {"steps": steps}
    sizes = sizes_of_run(cfg, len(train))
    epochs = sizes.epochs_of(total)
    steps += f" = {epochs:.2f} epochs of {sizes.per_epoch:,} steps"
    last_batch = len(train) - (sizes.per_epoch - 1) * batch
    if last_batch != batch:
        steps += f"; the last step of an epoch has {last_batch} examples"
    return {"steps": steps, unit: f"{train.stats['tokens'] * epochs:,.0f} in the whole run"}


def _learning_rates(cfg: RunConfig, schedule: Callable[[int], float], total: int) -> str:
    """Format the learning rates at the start, the end of warmup, the middle and the end."""
    shown_steps = {0, warmup_updates(cfg, total), total // 2, total - 1}
    rates = [f"{schedule(step):.2e} at step {step}" for step in sorted(shown_steps) if step < total]
    return f"{cfg.lr_scheduler_type}: {', '.join(rates)}"


def _disk_bytes(cfg: RunConfig, parameters: int, trainable: int, total: int, copies: int) -> int:
    """Return the peak size of checkpoints/ and final/ during the run, in bytes."""
    width = torch.finfo(getattr(torch, cfg.dtype)).bits // 8
    checkpoint = width * (parameters + memory_estimate.optimizer_moments(cfg) * trainable)
    checkpoint += copies * max(width, 4) * trainable
    # Old checkpoints are deleted after the next one is written, and the best and every Nth are kept besides the newest.
    kept = cfg.save_total_limit + 1 + bool(cfg.metric_for_best_model)
    kept += total // math.lcm(cfg.save_steps, cfg.save_keep_every) if cfg.save_keep_every else 0
    saved = max(1, total // cfg.save_steps) + 1
    return checkpoint * min(kept, saved) + width * parameters


def run_notes(cfg: RunConfig, splits: dict, techniques: Techniques, start: Path | None, step: int) -> list[str]:
    """Return messages about this run: the step it resumes from, notes on its data, techniques and ignored fields."""
    notes = [f"Resuming from step {step:,} ({start})"] if start else []
    notes += data_notes(splits)
    total = total_steps(cfg, splits["train"].stats["examples"])
    if cfg.warmup_steps > total:
        notes.append(
            f"warning: warmup_steps is {cfg.warmup_steps:g}, but the run has only {total} steps: all are warmup"
        )
    per_epoch = sizes_of_run(cfg, splits["train"].stats["examples"] or 0).per_epoch  # a stream: unknown
    if not cfg.max_steps and 0 < per_epoch < FEW_STEPS:
        notes.append(
            f"warning: an epoch has only {per_epoch} step{'s' * (per_epoch > 1)} of up to {cfg.global_batch_size} examples: "
            "for more updates give a smaller global_batch_size, or more epochs"
        )
    if cfg.max_steps and cfg.num_train_epochs != RunConfig.num_train_epochs:
        notes.append(f"num_train_epochs {cfg.num_train_epochs:g} is ignored because max_steps is {cfg.max_steps}")
    return notes


def print_plan(cfg: RunConfig, task: Task, datasets: dict) -> None:
    """Print the plan of a run for `--dry_run`, without a process group.

    `--smoke` checks what a plan cannot show."""
    num_steps = total_steps(cfg, datasets["train"].stats["examples"])
    techniques = make_techniques(cfg)
    # On the CPU, changed and frozen as the run file says; without values and memory if the task can build it so.
    empty = "empty" in inspect.signature(task.build).parameters  # only sharded runs of a fork need it
    model = ModelWithLoss(task.build_model(empty=True) if empty else task.build_model(), task)
    techniques.change_model(model, cfg)
    make_optimizer(cfg, model, fused=False)  # freezes parameters
    print(table(plan_table(cfg, datasets, model, techniques, make_schedule(cfg, num_steps), num_steps)))
    print(*run_notes(cfg, datasets, techniques, None, 0), sep="\n")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
