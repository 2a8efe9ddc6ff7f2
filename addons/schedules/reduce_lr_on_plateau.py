"""A rate that falls when evaluations stop improving: torch's ReduceLROnPlateau, the only schedule that follows them.

Tests: tests/addons/schedules/test_reduce_lr_on_plateau.py.
"""

import math
from typing import Any

import torch

from engine.config.run_config import RunConfig

STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


def factor(x: float, **kwargs: Any) -> float:
    """Return 1: the factor is in the state. Raise TypeError or ValueError for arguments with which a later evaluation
    would fail: torch checks few of them."""
    if x > 0:  # checked at the start
        return 1.0
    scheduler = _scheduler(kwargs, 1.0, greater=False)
    for value in (1.0, 2.0, 2.0):  # a first evaluation, one that lowers the rate, one within the cooldown
        scheduler.step(value)
        scheduler.num_bad_epochs = 2**62
    if scheduler.patience < 0 or scheduler.cooldown < 0:
        raise ValueError("patience and cooldown must be 0 or more")
    return 1.0


def _scheduler(kwargs: dict[str, Any], rate: float, greater: bool) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    """Return torch's scheduler for a factor that begins at 1 and multiplies `rate`."""
    if "min_lr" in kwargs:
        kwargs = kwargs | {"min_lr": kwargs["min_lr"] / (rate or 1.0)}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max" if greater else "min", **kwargs)


def after_evaluation(cfg: RunConfig, state: dict | None, value: float | None, greater: bool) -> dict:
    """Return the state after an evaluation with the metric `value`: numbers of torch's scheduler, and the factor."""
    scheduler = _scheduler(cfg.lr_scheduler_kwargs or {}, cfg.learning_rate, greater)
    if state:
        vars(scheduler).update({name: state[name] for name in STATE if state[name] is not None})
        scheduler.optimizer.param_groups[0]["lr"] = state["factor"]
    scheduler.step(math.nan if value is None else value)
    numbers = {name: getattr(scheduler, name) for name in STATE}
    return numbers | {"factor": scheduler.optimizer.param_groups[0]["lr"]}
