"""Half cosines with hard restarts, down to a smallest rate (SGDR, Loshchilov 2017).

Tests: tests/addons/schedules/test_schedules.py.
"""

from addons.schedules._cosine import cosine_between


def factor(x: float, num_cycles: int = 3, min_lr_rate: float = 0.1) -> float:
    """Return `num_cycles` half cosines from 1 to `min_lr_rate`, each with a hard restart."""
    return cosine_between((x * num_cycles) % 1.0, 1.0, min_lr_rate)
