"""Examples of each step, as positions of an epoch: functions of the step.

Tests: tests/data/test_batch_plan.py.
"""

import math
from dataclasses import dataclass

from src.config.addons import function_of_addon
from src.config.schema import RunConfig


def steps_per_epoch(num_examples: int, global_batch: int) -> int:
    """Return the number of steps in an epoch. The last one holds the remaining examples."""
    return -(-num_examples // global_batch)


@dataclass(frozen=True)
class StepSizes:
    """The positions of an epoch that each step takes: the last step of an epoch takes the remaining ones.

    An add-on may derive other sizes from this class. It must find any step in O(1)."""

    num_examples: int
    global_batch: int

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch."""
        return steps_per_epoch(self.num_examples, self.global_batch)

    def locate(self, step: int) -> tuple[int, int]:
        """Return (epoch, step in the epoch) of step `step` of the run, both counted from 0."""
        return divmod(step, self.per_epoch)

    def first_step(self, epoch: int) -> int:
        """Return the number of steps before an epoch."""
        return epoch * self.per_epoch

    def positions(self, epoch: int, within: int) -> tuple[int, int]:
        """Return the first position of a step in its epoch, and the one after its last."""
        start = within * self.global_batch
        return start, min(start + self.global_batch, self.num_examples)

    def steps_of(self, epochs: float) -> int:
        """Return the number of steps in `epochs` epochs; a part of an epoch is a part of its steps, rounded up."""
        return math.ceil(round(epochs * self.per_epoch, 6))

    def epochs_of(self, step: int) -> float:
        """Return the number of epochs finished after `step` steps."""
        return step / self.per_epoch


def _plain_sizes(cfg: RunConfig, num_examples: int) -> StepSizes:
    return StepSizes(num_examples, cfg.global_batch_size)


def sizes_of_run(cfg: RunConfig, num_examples: int) -> StepSizes:
    """Return the sizes of the steps of a run with `num_examples` draws per epoch."""
    return function_of_addon(cfg, "step_sizes", _plain_sizes)(cfg, num_examples)
