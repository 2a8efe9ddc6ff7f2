"""Schedules that transformers lacks: functions of x, the share of the updates after warmup that are done.

A schedule of your own is one function and one line of OWN_SCHEDULES. Tests: tests/training/test_schedules.py.
"""

import math
from collections.abc import Callable

RISE = 0.25  # share of one_cycle in which the rate rises


def flat_cos(x: float, flat: float = 0.72, min_lr_rate: float = 0.0) -> float:
    """Return 1 for the share `flat`, then half a cosine down to `min_lr_rate` (fastai's fit_flat_cos)."""
    _check_share("flat", flat)
    return 1.0 if x < flat else cosine_between((x - flat) / (1 - flat), 1.0, min_lr_rate)


def one_cycle(x: float, rise: float = RISE, start: float = 1 / 25, end: float = 1e-5) -> float:
    """Return half a cosine from `start` up to 1 for the share `rise`, then one down to `end` (Smith 2018)."""
    _check_share("rise", rise)
    return cosine_between(x / rise, start, 1.0) if x < rise else cosine_between((x - rise) / (1 - rise), 1.0, end)


def cosine_restarts_min(x: float, num_cycles: int = 3, min_lr_rate: float = 0.1) -> float:
    """Return `num_cycles` half cosines from 1 to `min_lr_rate`, each with a hard restart (SGDR, Loshchilov 2017)."""
    return cosine_between((x * num_cycles) % 1.0, 1.0, min_lr_rate)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}, but it is a share: give 0 to 1")


def cosine_between(x: float, begin: float, end: float) -> float:
    """Return `begin` at x = 0 and `end` at x = 1, with half a cosine between them."""
    return end + (begin - end) * (1 + math.cos(math.pi * x)) / 2


OWN_SCHEDULES: dict[str, Callable[..., float]] = {
    "flat_cos": flat_cos,
    "one_cycle": one_cycle,
    "cosine_restarts_min": cosine_restarts_min,
}


def one_cycle_rise(kwargs: dict | None) -> float:
    """Return the share of one_cycle in which the rate rises, from `lr_scheduler_kwargs`."""
    return (kwargs or {}).get("rise", RISE)
