"""Learning-rate range test: the rates to try, when to stop, and what the losses suggest (Smith 2017, fastai's lr_find).

find_lr.py runs it. Tests: tests/training/test_find_lr.py.
"""

import math
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from src.config.fields import option

DIVERGED = 3  # a loss that is this many times its whole fall above the lowest one; fastai stops at 4 × the lowest


@dataclass
class RangeTest:
    """The flags of find_lr.py beside those of train.py."""

    start_lr: float = option("learning rate of the first update", 1e-7, above=0)
    end_lr: float = option("learning rate of the last update, unless the loss diverges before", 10.0, above=0)
    updates: int = option("updates; the learning rate grows by the same factor in each", 100, min=20, max=5000)
    curve: str | None = option("write the curve to this file (.png, .svg or .pdf), and its numbers beside it as .json")

    def check(self) -> list[str]:
        """Return one sentence for each error between the flags, or of the file."""
        errors = []
        if self.start_lr >= self.end_lr:
            errors.append(f"start_lr is {self.start_lr}: it must be below end_lr, which is {self.end_lr}")
        if self.curve and Path(self.curve).suffix not in (".png", ".svg", ".pdf"):
            errors.append(f"curve is {self.curve}: give a file that ends in .png, .svg or .pdf")
        elif self.curve and not os.access(Path(self.curve).absolute().parent, os.W_OK):
            errors.append(f"curve is {self.curve}: its folder does not exist, or is not writable")
        return errors

    def rate(self, update: int) -> float:
        """Return the learning rate of an update, counted from 0."""
        return self.start_lr * (self.end_lr / self.start_lr) ** (update / (self.updates - 1))


@dataclass
class Result:
    """What a range test found: one rate and one loss of the global batch an update."""

    rates: list[float]
    losses: list[float]
    smooth: list[float]  # the finite losses without the noise of single batches
    suggestion: float | None
    reason: str


def smoothed(losses: list[float], width: int) -> list[float]:
    """Return the median of the `2 * width + 1` losses around each loss.

    An average over past losses, as in fastai, would move the curve to higher rates; one around each loss would carry
    the losses of a divergence to lower ones."""
    return [median(losses[max(0, i - width) : i + width + 1]) for i in range(len(losses))]


def has_diverged(losses: list[float]) -> bool:
    """Return whether the last loss is not finite, or the last three are far above the lowest of the test."""
    if not math.isfinite(losses[-1]):
        return True
    recent = smoothed(losses, 1)
    lowest = min(recent)
    return median(losses[-3:]) > lowest + DIVERGED * max(abs(lowest), recent[0] - lowest)


def result(test: RangeTest, rates: list[float], losses: list[float]) -> Result:
    """Return what these losses suggest: a tenth of the rate with the lowest smoothed loss, if the loss has fallen."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    width = max(1, test.updates // 30)
    smooth = smoothed(finite, width) or [math.nan]
    low = smooth.index(min(smooth))
    # Of single batches, as the median difference between two in a row. The range of a smoothed noise without any fall
    # exceeds 7 times that of its median in 1 to 2 % of tests.
    noise = median([abs(b - a) for a, b in pairwise(finite)] or [0.0])
    fall = smooth[0] - smooth[low]
    stopped = has_diverged(losses)
    end = f"it diverged at {rates[-1]:.1e}" if stopped else f"it did not diverge up to {rates[-1]:.1e}"
    if not fall > 7 * noise / math.sqrt(2 * width + 1):
        text = f"the loss never fell by more than the noise between batches ({smooth[0]:.4g} at the start, "
        text += f"{smooth[low]:.4g} at the lowest, steps of {noise:.2g} between batches); {end}. "
        text += f"Give a lower --start_lr ({test.start_lr:g})" if stopped else f"Give more --updates ({test.updates})"
        return Result(rates, losses, smooth, None, text)
    steepest = min(range(width, len(smooth)), key=lambda i: smooth[i] - smooth[i - width])
    reason = f"a tenth of {rates[low]:.1e}, where the smoothed loss was lowest ({smooth[low]:.4g}); it fell fastest at "
    reason += f"{rates[steepest]:.1e}, and {end}"
    if low > len(smooth) - 2 - width and not stopped:
        reason += ": the loss was still falling, so a higher --end_lr may find more"
    return Result(rates, losses, smooth, float(f"{rates[low] / 10:.1e}"), reason)
