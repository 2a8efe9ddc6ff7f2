"""Learning-rate schedule as a function of completed updates, and the number of steps of a run.

A schedule of your own is one file in addons/schedules/. Tests: tests/src/training/test_schedules.py.
"""

import math
from collections.abc import Callable

import torch

from engine.config.addons import follows_evaluations, schedule_addon
from engine.config.errors import errors_of
from engine.data.batch_plan import sizes_of_run
from src.fields import RunConfig


def total_steps(cfg: RunConfig, examples: int) -> int:
    """Return the number of optimizer steps of the whole run, from max_steps or num_train_epochs."""
    return cfg.max_steps or sizes_of_run(cfg, examples).steps_of(cfg.num_train_epochs)


def warmup_updates(cfg: RunConfig, total: int) -> int:
    """Return the number of warmup updates in a run of `total` updates, at most `total`."""
    return min(total, round(cfg.warmup_steps * total) if cfg.warmup_steps < 1 else int(cfg.warmup_steps))


def make_schedule(cfg: RunConfig, total: int) -> Callable[[int], float]:
    """Return a function from completed updates to learning rate, for a run of `total` updates."""
    warmup, kwargs, name = warmup_updates(cfg, total), dict(cfg.lr_scheduler_kwargs or {}), cfg.lr_scheduler_type
    with errors_of(f"lr_scheduler_kwargs: {kwargs} is not valid for {name}"):
        factor = _factor(cfg, warmup, total, kwargs)
        if not all(0 <= factor(update) < math.inf for update in (0, total // 2, total - 1)):
            raise ValueError("a learning rate would be negative, or not finite")
    peak, start = cfg.learning_rate, cfg.warmup_start_lr
    if not start:
        return lambda updates: peak * factor(updates)
    return lambda n: start + (peak - start) * n / warmup if n < warmup else peak * factor(n)


def _factor(cfg: RunConfig, warmup: int, total: int, kwargs: dict) -> Callable[[int], float]:
    """Return a function from completed updates to the learning rate as a multiple of `cfg.learning_rate`."""
    if addon := schedule_addon(cfg):
        addon.factor(0.0, **kwargs)  # raises TypeError for unknown arguments
        left = max(1, total - warmup)
        return lambda n: n / warmup if n < warmup else addon.factor((n - warmup) / left, **kwargs)
    from transformers import get_scheduler

    if kwargs and cfg.lr_scheduler_type in ("constant", "constant_with_warmup"):
        raise TypeError("it takes no arguments")  # transformers would ignore them
    if cfg.lr_scheduler_type == "warmup_stable_decay":
        kwargs.setdefault("num_decay_steps", total // 5)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=cfg.learning_rate)
    scheduler = get_scheduler(cfg.lr_scheduler_type, optimizer, warmup, total, scheduler_specific_kwargs=kwargs)
    return scheduler.lr_lambdas[0]


def has_same_rates(before: RunConfig, cfg: RunConfig, examples: int, progress: dict) -> bool:
    """Return whether `cfg` would have had the learning rates of `before`, which differs only in its length, so far.

    `progress` is what a checkpoint says of the run: its updates, and the step of its last evaluation."""
    old_length = total_steps(before, examples)
    new_length = total_steps(cfg, examples)
    if old_length == new_length:
        return True
    if follows_evaluations(cfg) and cfg.eval_steps and progress["evaluated"] % cfg.eval_steps:
        return False  # it has counted the evaluation at the end, which the longer run would not have had
    old_rate = make_schedule(before, old_length)
    new_rate = make_schedule(cfg, new_length)
    return all(old_rate(update) == new_rate(update) for update in range(progress["updates"]))
