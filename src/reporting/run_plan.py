"""The plan printed by `--dry_run` and at the start: steps, tokens, learning rate, memory, disk.

Tests: tests/config/test_command_line.py.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch

from src.config.schema import RunConfig
from src.data.data_stats import data_notes, format_stats
from src.data.step_sizes import batch_warmup, length_warmup, sizes_of_run
from src.models import memory_estimate
from src.tasks import Task
from src.training.parameter_groups import describe_groups
from src.training.schedules import total_steps, warmup_updates
from src.training.step import ModelWithLoss
from src.training.techniques import Techniques
from src.training.train_state import TrainState


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
        held_out = f", held out by validation_split {cfg.validation_split:g}" if cfg.validation_split else ""
        rows["evaluation data"] = format_stats(splits["validation"].stats, module.task.unit) + held_out
    else:
        rows["evaluation data"] = "none: no evaluation"
    rows |= _length(cfg, train, total, module.task.unit) | _data_order(cfg, module.task)
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
    if cfg.streaming:
        return {"steps": f"{steps} from a stream of {len(train.shards):,} shards in {train.shard_groups} shard groups"}
    sizes = sizes_of_run(cfg, len(train))
    last_batch = len(train) - (sizes.per_epoch - 1) * batch
    if sizes.warmup:
        steps = (
            f"{total:,} = {sizes.epochs_of(total):.2f} epochs, of {sizes.per_epoch:,} steps after the batch-size warmup"
        )
        epochs = sizes.passes(total)
    else:
        steps += f" = {total / sizes.per_epoch:.2f} epochs of {sizes.per_epoch:,} steps"
        epochs = total / sizes.per_epoch
    if last_batch != batch:
        steps += f"; the last step of an epoch has {last_batch} examples"
    shorter = ", fewer because rows are shortened at first" if cfg.sequence_length_warmup_steps else ""
    return {"steps": steps, unit: f"{train.stats['tokens'] * epochs:,.0f} in the whole run{shorter}"}


def _data_order(cfg: RunConfig, task: Task) -> dict[str, str]:
    """Format the warmups of the global batch and of the length of rows, the curriculum and row weights, if any."""
    ramps = {"global batch": batch_warmup(cfg), "tokens per row": length_warmup(cfg, task)}
    rows = {name: str(ramp) for name, ramp in ramps.items() if ramp}
    if cfg.curriculum_steps:
        rows["curriculum"] = f"ascending {cfg.curriculum_column} in the first {cfg.curriculum_steps:,} steps"
    if cfg.sample_weight_column:
        rows["draws"] = f"in proportion to {cfg.sample_weight_column}, with replacement"
    return rows


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


def run_notes(
    cfg: RunConfig, splits: dict, techniques: Techniques, start: Path | None, progress: TrainState, complete: bool
) -> list[str]:
    """Return messages about this run: the step it resumes from, notes on its data, fields without effect."""
    notes = [f"Resuming from step {progress.step:,} ({start})"] if start else []
    if complete:
        notes.append(
            f"nothing is left to train: this run is complete at step {progress.step:,}; to train another run, give "
            "--output_dir, or --resume never to start over"
        )
    notes += data_notes(splits) + techniques.notes(cfg)
    total = total_steps(cfg, splits["train"].stats["examples"])
    if cfg.warmup_steps > total:
        notes.append(
            f"warning: warmup_steps is {cfg.warmup_steps:g}, but the run has only {total} steps (max_steps): "
            f"the warmup takes all {total}"
        )
    if cfg.max_steps and cfg.num_train_epochs != RunConfig.num_train_epochs:
        notes.append(f"num_train_epochs {cfg.num_train_epochs:g} is ignored because max_steps is {cfg.max_steps}")
    return notes


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
