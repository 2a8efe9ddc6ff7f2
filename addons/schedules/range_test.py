"""A rate that grows by the same factor in each update, for a range test (Smith 2017): make find-lr.

Tests: tests/addons/schedules/test_schedules.py.
"""


def factor(x: float, min_lr_rate: float = 1e-8) -> float:
    """Return `min_lr_rate` at x = 0, and 1 at x = 1."""
    if not 0 < min_lr_rate <= 1:
        raise ValueError(f"min_lr_rate is {min_lr_rate}, but it is the first rate as a share of the last: give 0 to 1")
    return min_lr_rate ** (1 - x)
