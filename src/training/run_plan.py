"""The plan printed by `--dry_run` and at the start: steps, tokens, learning rate, memory, disk.

Tests: tests/engine/config/test_dry_run.py.
"""

import inspect
from collections.abc import Callable

from engine.config.addons import used_addons
from engine.data.batch_plan import sizes_of_run
from engine.data.prepared_split import data_notes, format_stats
from engine.loop.model_with_loss import ModelWithLoss
from engine.loop.run_size import size_rows
from engine.loop.techniques import Techniques, make_techniques
from engine.process.console import table
from engine.task import Task
from src.fields import RunConfig
from src.training.optimizers import make_optimizer
from src.training.schedules import make_schedule, total_steps, warmup_updates

FEW_STEPS = 10  # of an epoch: fewer are warned of


def plan_table(
    cfg: RunConfig, splits: dict, module: ModelWithLoss, techniques: Techniques, schedule: Callable, total: int
) -> dict[str, str]:
    """Return the plan as {name: text}: data, steps, learning rate, parameters, and the memory and disk needed."""
    train, task, stats = splits["train"], module.task, splits["train"].stats
    rows = {"task": cfg.task, "training data": format_stats(stats, task.unit)}
    if train.quotas:
        draws = zip(train.segments(), train.quotas, strict=True)
        rows["mixture"] = "; ".join(f"{name}: {n:,} of {size:,} rows per epoch" for (name, *_), (size, n) in draws)
    val_set = splits.get("validation")
    rows["evaluation data"] = format_stats(val_set.stats, task.unit) if val_set else "none: no evaluation"
    rows["steps"] = f"{total:,} of {cfg.global_batch_size} examples"
    if stats["examples"] is not None:  # a stream does not know its rows
        sizes = sizes_of_run(cfg, len(train))
        tail = len(train) - (sizes.per_epoch - 1) * cfg.global_batch_size
        epochs = sizes.epochs_of(total)
        rows["steps"] += f" = {epochs:.2f} epochs of {sizes.per_epoch:,} steps"
        rows["steps"] += f"; the last step of an epoch has {tail} examples" * (tail != cfg.global_batch_size)
        rows[task.unit] = f"{stats['tokens'] * epochs:,.0f} in the whole run"
    for each in used_addons(cfg):
        rows |= each.plan_rows(cfg, task, train, total, rows)
    shown = sorted({0, min(warmup_updates(cfg, total), total - 1), total // 2, total - 1})
    rates = ", ".join(f"{schedule(step):.2e} at step {step}" for step in shown)
    rows["learning rate"] = f"{cfg.lr_scheduler_type}: {rates}"
    rows |= techniques.plan()
    return rows | size_rows(cfg, module, techniques, total)


def run_notes(cfg: RunConfig, splits: dict) -> list[str]:
    """Return messages about the data and ignored fields of a run."""
    notes = data_notes(splits)
    per_epoch = sizes_of_run(cfg, splits["train"].stats["examples"] or 0).per_epoch  # a stream: unknown
    if not cfg.max_steps and 0 < per_epoch < FEW_STEPS:
        notes.append(
            f"warning: an epoch has only {per_epoch} step{'s' * (per_epoch > 1)} of up to {cfg.global_batch_size} examples: "
            "for more updates give a smaller global_batch_size, or more epochs"
        )
    total = total_steps(cfg, splits["train"].stats["examples"] or 0)
    if warmup_updates(cfg, total) == total > 1:
        notes.append(
            f"warning: warmup_steps {cfg.warmup_steps:g} fills all {total:,} steps: the learning rate only rises"
        )
    if cfg.max_steps and cfg.num_train_epochs != RunConfig.num_train_epochs:
        notes.append(f"num_train_epochs {cfg.num_train_epochs:g} is ignored because max_steps is {cfg.max_steps}")
    return notes


def print_plan(cfg: RunConfig, task: Task, datasets: dict) -> None:
    """Print the plan of a run for `--dry_run`, without a process group."""
    num_steps = total_steps(cfg, datasets["train"].stats["examples"])
    techniques = make_techniques(cfg)
    # On the CPU, changed and frozen as the run file says; without values and memory if the task can build it so.
    empty = "empty" in inspect.signature(task.build).parameters  # only sharded runs of a fork need it
    model = ModelWithLoss(task.build_model(empty=True) if empty else task.build_model(), task)
    techniques.change_model(model, cfg)
    make_optimizer(cfg, model, fused=False)  # freezes parameters
    print(table(plan_table(cfg, datasets, model, techniques, make_schedule(cfg, num_steps), num_steps)))
    print(*run_notes(cfg, datasets), sep="\n")
