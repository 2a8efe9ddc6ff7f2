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
    """Return the updates of warmup in a run of `total` updates: at most all of them, as in a short trial."""
    return min(total, round(cfg.warmup_steps * total) if cfg.warmup_steps < 1 else int(cfg.warmup_steps))


def make_schedule(cfg: RunConfig, total: int) -> Callable[[int], float]:
    """Return completed updates -> learning rate, by transformers' schedule of the same name over `total` updates."""
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
        raise UsageError(f"lr_scheduler_kwargs: {cfg.lr_scheduler_type} does not take {kwargs}: {error}") from error
    return lambda updates: cfg.learning_rate * factor(updates)


def total_steps(cfg: RunConfig, examples: int) -> int:
    """Return the optimizer steps of the whole run."""
    return cfg.max_steps or math.ceil(round(cfg.num_train_epochs * steps_per_epoch(examples, cfg.global_batch_size), 6))
