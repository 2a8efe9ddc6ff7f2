"""Learning-rate schedule as a function of completed updates, and the number of steps of a run.

A schedule of your own is one function and one line in src/config/schedule_functions.py. Tests:
tests/training/test_schedules.py.
"""

import math
from collections.abc import Callable

import torch

from src.config.errors import UsageError
from src.config.schedule_functions import OWN_SCHEDULES, cosine_between, one_cycle_rise
from src.config.schema import RunConfig
from src.data.step_sizes import sizes_of_run

# ---- the schedule of a run -------------------------------------------------------------------------------------------


def warmup_updates(cfg: RunConfig, total: int) -> int:
    """Return the number of warmup updates in a run of `total` updates, at most `total`."""
    return min(total, round(cfg.warmup_steps * total) if cfg.warmup_steps < 1 else int(cfg.warmup_steps))


def make_schedule(cfg: RunConfig, total: int) -> Callable[[int], float]:
    """Return a function from completed updates to learning rate, for a run of `total` updates."""
    warmup = warmup_updates(cfg, total)
    kwargs = dict(cfg.lr_scheduler_kwargs or {})
    try:
        if kwargs and cfg.lr_scheduler_type in ("constant", "constant_with_warmup"):
            raise TypeError("it takes no arguments")  # transformers would ignore them
        if cfg.lr_scheduler_type == PLATEAU:
            _try_plateau(cfg)
            after_warmup = _own_schedule(warmup, total, lambda x: 1.0, {})
        elif cfg.lr_scheduler_type in OWN_SCHEDULES:
            after_warmup = _own_schedule(warmup, total, OWN_SCHEDULES[cfg.lr_scheduler_type], kwargs)
        else:
            after_warmup = _transformers_schedule(cfg, warmup, total, kwargs)
        if not all(0 <= after_warmup(update) < math.inf for update in (0, total // 2, total - 1)):
            raise ValueError("a learning rate would be negative, or not finite")
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise UsageError(f"lr_scheduler_kwargs: {kwargs} is not valid for {cfg.lr_scheduler_type}: {error}") from error
    start = cfg.warmup_start_lr

    def learning_rate(updates: int) -> float:
        if start and updates < warmup:
            return start + (cfg.learning_rate - start) * updates / warmup
        return cfg.learning_rate * after_warmup(updates)

    return learning_rate


def one_cycle_momentum(cfg: RunConfig, total: int, base: float, highest: float) -> Callable[[int], float]:
    """Return a function from completed updates to the momentum that belongs to the schedule one_cycle.

    It is `highest` during a warmup, falls to `base` while the rate rises, and returns by half a cosine."""
    rise, warmup = one_cycle_rise(cfg.lr_scheduler_kwargs), warmup_updates(cfg, total)

    def momentum(updates: int) -> float:
        x = max(0, updates - warmup) / max(1, total - warmup)
        if x < rise:
            return cosine_between(x / rise, highest, base)
        return cosine_between((x - rise) / (1 - rise), base, highest)

    return momentum


def _own_schedule(warmup: int, total: int, schedule: Callable[..., float], kwargs: dict) -> Callable[[int], float]:
    schedule(0.0, **kwargs)  # raises TypeError for unknown arguments

    def factor(updates: int) -> float:
        if updates < warmup:
            return updates / warmup
        return schedule((updates - warmup) / max(1, total - warmup), **kwargs)

    return factor


def _transformers_schedule(cfg: RunConfig, warmup: int, total: int, kwargs: dict) -> Callable[[int], float]:
    from transformers import get_scheduler

    base = torch.optim.SGD([torch.zeros(1)], lr=cfg.learning_rate)
    if cfg.lr_scheduler_type == "warmup_stable_decay":
        kwargs.setdefault("num_decay_steps", total // 5)
    scheduler = get_scheduler(
        cfg.lr_scheduler_type,
        base,
        num_warmup_steps=warmup,
        num_training_steps=total,
        scheduler_specific_kwargs=kwargs,
    )
    return scheduler.lr_lambdas[0]


# ---- reduce_lr_on_plateau: the only schedule that depends on evaluations ---------------------------------------------

PLATEAU = "reduce_lr_on_plateau"
PLATEAU_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


def _plateau(cfg: RunConfig, greater: bool) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    """Return torch's scheduler for a factor that begins at 1; its arguments are `lr_scheduler_kwargs`."""
    kwargs = dict(cfg.lr_scheduler_kwargs or {})
    if "min_lr" in kwargs:
        kwargs["min_lr"] = kwargs["min_lr"] / cfg.learning_rate  # of the factor
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max" if greater else "min", **kwargs)


def _try_plateau(cfg: RunConfig) -> None:
    """Raise TypeError or ValueError for arguments with which a later evaluation would fail: torch checks few of them."""
    scheduler = _plateau(cfg, greater=False)
    for value in (1.0, 2.0, 2.0):  # a first evaluation, one that lowers the rate, one within the cooldown
        scheduler.step(value)
        scheduler.num_bad_epochs = 2**62
    if scheduler.patience < 0 or scheduler.cooldown < 0:
        raise ValueError("patience and cooldown must be 0 or more")


def after_evaluation(cfg: RunConfig, state: dict | None, value: float | None, greater: bool) -> dict | None:
    """Return the state of reduce_lr_on_plateau after an evaluation with the metric `value`; None for other schedules.

    The state is JSON: `factor` multiplies the learning rate, the rest are numbers of torch's scheduler."""
    if cfg.lr_scheduler_type != PLATEAU:
        return None
    scheduler = _plateau(cfg, greater)
    if state:
        vars(scheduler).update({name: state[name] for name in PLATEAU_STATE if state[name] is not None})
        scheduler.optimizer.param_groups[0]["lr"] = state["factor"]
    scheduler.step(math.nan if value is None else value)
    found = {name: getattr(scheduler, name) for name in PLATEAU_STATE}
    return found | {"factor": scheduler.optimizer.param_groups[0]["lr"]}


def total_steps(cfg: RunConfig, examples: int) -> int:
    """Return the number of optimizer steps of the whole run, from max_steps or num_train_epochs."""
    return cfg.max_steps or sizes_of_run(cfg, examples).steps_of(cfg.num_train_epochs)
