"""A rate that rises and falls once, by half cosines, and the momentum that belongs to it (Smith 2018).

Tests: tests/addons/schedules/test_schedules.py, tests/addons/techniques/test_cycle_momentum.py.
"""

from collections.abc import Callable

from addons.schedules._cosine import check_share, cosine_between
from src.fields import RunConfig
from src.training.schedules import warmup_updates

RISE = 0.25  # share in which the rate rises


def factor(x: float, rise: float = RISE, start: float = 1 / 25, end: float = 1e-5) -> float:
    """Return half a cosine from `start` up to 1 for the share `rise`, then one down to `end`."""
    check_share("rise", rise)
    return cosine_between(x / rise, start, 1.0) if x < rise else cosine_between((x - rise) / (1 - rise), 1.0, end)


def one_cycle_momentum(cfg: RunConfig, total: int, base: float, highest: float) -> Callable[[int], float]:
    """Return a function from completed updates to the momentum that belongs to the schedule one_cycle.

    It is `highest` during a warmup, falls to `base` while the rate rises, and returns by half a cosine."""
    rise, warmup = (cfg.lr_scheduler_kwargs or {}).get("rise", RISE), warmup_updates(cfg, total)

    def momentum(updates: int) -> float:
        x = max(0, updates - warmup) / max(1, total - warmup)
        if x < rise:
            return cosine_between(x / rise, highest, base)
        return cosine_between((x - rise) / (1 - rise), base, highest)

    return momentum
