"""The plan printed by `--dry_run` and at the start: steps, tokens, learning rate, memory, disk.

Tests: tests/engine/config/test_dry_run.py.
"""

import inspect
from collections.abc import Callable

from engine.models.compile_and_recompute import compile_and_recompute
from engine.plan.batch_plan import sizes_of_run
from engine.process.console import table
from engine.rows.prepared_split import data_notes, describe_rows, format_stats, holds_chats
from engine.run.model_with_loss import ModelWithLoss
from engine.run.run_size import size_rows
from engine.run.techniques import Techniques, make_techniques
from engine.task import Task
from src.fields import RunConfig
from src.training.optimizers import make_optimizer
from src.training.schedules import make_schedule, total_steps, warmup_updates

FEW_STEPS = 10  # of an epoch: fewer are warned of


def plan_table(
    cfg: RunConfig, splits: dict, model: ModelWithLoss, optimizer, techniques: Techniques, lr_at: Callable, total: int
) -> dict[str, str]:
    """Return the plan as {name: text}: data, steps, rates, parameters, and the memory and disk needed."""
    train_set = splits["train"]
    rows = data_rows(cfg, splits, model.task)
    rows |= step_rows(cfg, train_set, model.task, total)
    for addon in cfg.addons:
        rows |= addon.plan_rows(cfg, model.task, train_set, total, rows)
    rows["learning rate"] = f"{cfg.lr_scheduler_type}: {format_rates(cfg, lr_at, total)}"
    rows |= techniques.plan()
    longest = train_set.stats.get("longest") if model.task.unit == "tokens" else None
    return rows | size_rows(cfg, model, optimizer, techniques, total, longest or 0)


def data_rows(cfg: RunConfig, splits: dict, task: Task) -> dict[str, str]:
    """Return the rows of the plan about task and data."""
    train_set = splits["train"]
    val_set = splits.get("validation")
    rows = {"task": cfg.task, "training data": format_stats(train_set.stats, task.unit)}
    rows |= task.plan_rows(holds_chats(train_set, task))
    if train_set.quotas:
        draws = []
        for (source, *_), (size, drawn) in zip(train_set.segments(), train_set.quotas, strict=True):
            draws.append(f"{source}: {drawn:,} of {size:,} rows per epoch")
        rows["mixture"] = "; ".join(draws)
    rows["evaluation data"] = format_stats(val_set.stats, task.unit) if val_set else "none: no evaluation"
    formats = describe_rows(splits)
    return rows | ({"rows": formats} if formats else {})


def step_rows(cfg: RunConfig, train_set, task: Task, total: int) -> dict[str, str]:
    """Return the rows of the plan about steps, epochs and tokens."""
    steps = f"{total:,} of {cfg.global_batch_size} examples"
    if train_set.stats["examples"] is None:  # a stream does not know its rows
        return {"steps": steps}
    sizes = sizes_of_run(cfg, len(train_set))
    epochs = sizes.epochs_of(total)
    steps += f" = {epochs:.2f} epochs of {sizes.per_epoch:,} steps"
    last_batch = len(train_set) - (sizes.per_epoch - 1) * cfg.global_batch_size
    if last_batch != cfg.global_batch_size:
        steps += f"; the last step of an epoch has {last_batch} examples"
    return {"steps": steps, task.unit: f"{train_set.stats['tokens'] * epochs:,.0f} in the whole run"}


def format_rates(cfg: RunConfig, lr_at: Callable, total: int) -> str:
    """Format the learning rates at the start, after warmup, in the middle and at the end."""
    end_of_warmup = min(warmup_updates(cfg, total), total - 1)
    steps = sorted({0, end_of_warmup, total // 2, total - 1})
    return ", ".join(f"{lr_at(step):.2e} at step {step}" for step in steps)


def run_notes(cfg: RunConfig, splits: dict) -> list[str]:
    """Return messages about the data and ignored fields of a run."""
    notes = data_notes(splits)
    examples = splits["train"].stats["examples"] or 0  # 0: a stream does not know its rows
    per_epoch = sizes_of_run(cfg, examples).per_epoch
    if not cfg.max_steps and 0 < per_epoch < FEW_STEPS:
        steps = "1 step" if per_epoch == 1 else f"{per_epoch} steps"
        notes.append(
            f"warning: an epoch has only {steps} of up to {cfg.global_batch_size} examples: "
            "for more updates give a smaller global_batch_size, or more epochs"
        )
    total = total_steps(cfg, examples)
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
    compile_and_recompute(model.model, cfg)
    optimizer = make_optimizer(cfg, model, fused=False)  # freezes parameters
    lr_at = make_schedule(cfg, num_steps)
    print(table(plan_table(cfg, datasets, model, optimizer, techniques, lr_at, num_steps)))
    print(*run_notes(cfg, datasets), sep="\n")
