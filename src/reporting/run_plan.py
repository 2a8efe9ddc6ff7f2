"""The plan printed by `--dry_run` and at the start: steps, tokens, learning rate, memory, disk.

Tests: tests/config/test_command_line.py.
"""

import torch

from src.config.schema import RunConfig
from src.data.batch_plan import steps_per_epoch
from src.data.data_stats import data_notes, format_stats
from src.models import memory_estimate
from src.training.optimizers import total_steps, warmup_updates
from src.training.state import TrainState
from src.training.step import ModelWithLoss


def plan_table(cfg: RunConfig, splits: dict, model: torch.nn.Module, schedule, total: int) -> dict[str, str]:
    """Return the plan as a table: data, steps, tail, learning rate at its corners, parameters, memory and disk needed."""
    train = splits["train"]
    model = model.model if isinstance(model, ModelWithLoss) else model
    counted = memory_estimate.count(model)
    parameters, trainable = counted.parameters, counted.trained
    width = torch.finfo(getattr(torch, cfg.dtype)).bits // 8
    disk = (
        width
        * (parameters + memory_estimate.moments(cfg) * trainable)
        * min(cfg.save_total_limit + 1 + bool(cfg.metric_for_best_model), saves(cfg, total) + 1)
        + width * parameters
    )
    warmup = warmup_updates(cfg, total)
    corners = sorted({step for step in (0, warmup, total // 2, total - 1) if step < total})
    rows = {"task": cfg.task, "training data": format_stats(train.stats)}
    if train.quotas:
        drawn = zip(train.segments(), train.quotas, strict=True)
        rows["mixture"] = "; ".join(f"{name}: {draws:,} of {n:,} rows an epoch" for (name, *_), (n, draws) in drawn)
    rows["evaluation data"] = (
        format_stats(splits["validation"].stats) if "validation" in splits else "none: no evaluation"
    )
    rows |= _length(cfg, train, total)
    rows["learning rate"] = f"{cfg.lr_scheduler_type}: " + ", ".join(f"{schedule(s):.2e} at step {s}" for s in corners)
    rows["parameters"] = f"{parameters:,}, {trainable:,} of them trained, in {cfg.dtype}"
    # Activations are counted on a model that nothing has wrapped.
    rows["memory"] = memory_estimate.in_words(cfg, model, _size, train.stats.get("longest") if cfg.dry_run else None)
    rows["disk"] = f"{_size(disk)} for checkpoints and the final model in {cfg.output_dir}"
    return rows


def _length(cfg: RunConfig, train, total: int) -> dict[str, str]:
    """Return how long the run is, in steps and tokens."""
    batch = cfg.global_batch_size
    if cfg.streaming:
        return {
            "steps": f"{total:,} of {batch} examples from a stream of {len(train.shards):,} shards in {train.lanes} lanes"
        }
    per_epoch = steps_per_epoch(len(train), batch)
    tail = len(train) - (per_epoch - 1) * batch
    epochs = f"{total * batch / len(train):.2f} epochs of {per_epoch:,} steps"
    tokens = train.stats["tokens"] * total / per_epoch
    return {
        "steps": f"{total:,} of {batch} examples = {epochs}"
        + (f"; the last of an epoch has {tail}" if tail != batch else ""),
        "tokens": f"{tokens:,.0f} in the whole run",
    }


def saves(cfg: RunConfig, total: int) -> int:
    return max(1, total // cfg.save_steps)


def run_notes(cfg: RunConfig, splits: dict, start, progress: TrainState, complete: bool) -> list[str]:
    """Return what somebody may not expect: where the run goes on from, and what happened to the data."""
    found = [f"going on from {start}, step {progress.step:,}"] if start else []
    if complete:
        found.append(
            f"nothing is left to train: this run is complete at step {progress.step:,}; for another one give "
            "--output_dir, or --resume never to start it anew"
        )
    found += data_notes(splits)
    if cfg.warmup_steps > (total := total_steps(cfg, splits["train"].stats["examples"])):
        found.append(
            f"warning: warmup_steps {cfg.warmup_steps:g} is more than the {total} steps of the run (max_steps): {total} are used"
        )
    if cfg.max_steps and cfg.num_train_epochs != RunConfig.num_train_epochs:
        found.append(f"num_train_epochs {cfg.num_train_epochs:g} is ignored: max_steps {cfg.max_steps} wins")
    return found


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
