"""Learning-rate schedule as a function of completed updates, and the number of steps of a run.

Tests: tests/training/test_optimizers.py.
"""

import math
from collections.abc import Callable

import torch

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.data.batch_plan import steps_per_epoch


def warmup_updates(cfg: RunConfig, total: int) -> int:
    """Return the number of warmup updates in a run of `total` updates, at most `total`."""
    return min(total, round(cfg.warmup_steps * total) if cfg.warmup_steps < 1 else int(cfg.warmup_steps))


def make_schedule(cfg: RunConfig, total: int) -> Callable[[int], float]:
    """Return a function from completed updates to learning rate: transformers' schedule over `total` updates."""
    from transformers import get_scheduler

    warmup = warmup_updates(cfg, total)
    base = torch.optim.SGD([torch.zeros(1)], lr=cfg.learning_rate)
    kwargs = dict(cfg.lr_scheduler_kwargs or {})
    if cfg.lr_scheduler_type == "warmup_stable_decay":
        kwargs.setdefault("num_decay_steps", total // 5)
    try:
        scheduler = get_scheduler(
            cfg.lr_scheduler_type,
            base,
            num_warmup_steps=warmup,
            num_training_steps=total,
            scheduler_specific_kwargs=kwargs,
        )
        factor = scheduler.lr_lambdas[0]
        if not all(math.isfinite(factor(update)) for update in (0, total // 2, total - 1)):
            raise ValueError("a learning rate would not be finite")
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise UsageError(f"lr_scheduler_kwargs: {kwargs} is not valid for {cfg.lr_scheduler_type}: {error}") from error
    return lambda updates: cfg.learning_rate * factor(updates)


def total_steps(cfg: RunConfig, examples: int) -> int:
    """Return the number of optimizer steps of the whole run, from max_steps or num_train_epochs."""
    return cfg.max_steps or math.ceil(round(cfg.num_train_epochs * steps_per_epoch(examples, cfg.global_batch_size), 6))
