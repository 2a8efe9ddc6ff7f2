"""A rate that is constant, then falls by half a cosine (fastai's fit_flat_cos).

Tests: tests/addons/schedules/test_schedules.py.
"""

from addons.schedules._cosine import check_share, cosine_between


def factor(x: float, flat: float = 0.72, min_lr_rate: float = 0.0) -> float:
    """Return 1 for the share `flat`, then half a cosine down to `min_lr_rate`."""
    check_share("flat", flat)
    return 1.0 if x < flat else cosine_between((x - flat) / (1 - flat), 1.0, min_lr_rate)
