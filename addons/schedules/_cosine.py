"""Half a cosine, and the check of a share, for schedules."""

import math


def check_share(name: str, value: float) -> None:
    """Raise ValueError if the argument `name` of a schedule is no share."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}, but it is a share: give 0 to 1")


def cosine_between(x: float, begin: float, end: float) -> float:
    """Return `begin` at x = 0 and `end` at x = 1, with half a cosine between them."""
    return end + (begin - end) * (1 + math.cos(math.pi * x)) / 2
