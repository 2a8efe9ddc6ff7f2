"""Learning-rate schedule as a function of completed updates, and the number of steps of a run.

A schedule of your own is one file in addons/schedules/. Tests: tests/src/training/test_schedules.py.
"""

import math
from collections.abc import Callable

import torch

from engine.config.errors import errors_of
from engine.config.find_addons import follows_evaluations, schedule_addon
from engine.plan.batch_plan import sizes_of_run
from src.fields import RunConfig


def total_steps(cfg: RunConfig, examples: int) -> int:
    """Return the number of optimizer steps of the whole run, from max_steps or num_train_epochs."""
    return cfg.max_steps or sizes_of_run(cfg, examples).steps_of(cfg.num_train_epochs)


def warmup_updates(cfg: RunConfig, total: int) -> int:
    """Return the number of warmup updates in a run of `total` updates, at most `total`."""
    warmup = cfg.warmup_steps
    updates = round(warmup * total) if warmup < 1 else int(warmup)  # below 1 it is a share of the run
    return min(total, updates)


def make_schedule(cfg: RunConfig, total: int) -> Callable[[int], float]:
    """Return a function from completed updates to learning rate, for a run of `total` updates."""
    kwargs = dict(cfg.lr_scheduler_kwargs or {})
    warmup = warmup_updates(cfg, total)
    with errors_of(f"lr_scheduler_kwargs: {kwargs} is not valid for {cfg.lr_scheduler_type}"):
        factor = _factor(cfg, warmup, total, kwargs)
        if not all(0 <= factor(update) < math.inf for update in (0, total // 2, total - 1)):
            raise ValueError("a learning rate would be negative, or not finite")
    peak = cfg.learning_rate
    start = cfg.warmup_start_lr

    def lr_at(updates: int) -> float:
        if start and updates < warmup:
            return start + (peak - start) * updates / warmup
        return peak * factor(updates)

    return lr_at


def _factor(cfg: RunConfig, warmup: int, total: int, kwargs: dict) -> Callable[[int], float]:
    """Return a function from completed updates to the learning rate as a multiple of `cfg.learning_rate`."""
    addon = schedule_addon(cfg)
    if addon is not None:
        return _factor_of_addon(addon.factor, warmup, total, kwargs)
    return _factor_of_transformers(cfg, warmup, total, kwargs)


def _factor_of_addon(after_warmup: Callable, warmup: int, total: int, kwargs: dict) -> Callable[[int], float]:
    """Return a linear warmup, then what a file in addons/schedules/ says for the share of updates since then."""
    after_warmup(0.0, **kwargs)  # raises TypeError for unknown arguments
    remaining = max(1, total - warmup)

    def factor(updates: int) -> float:
        if updates < warmup:
            return updates / warmup
        return after_warmup((updates - warmup) / remaining, **kwargs)

    return factor


def _factor_of_transformers(cfg: RunConfig, warmup: int, total: int, kwargs: dict) -> Callable[[int], float]:
    """Return the schedule that transformers has by this name."""
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
