# Needs addons/schedules/one_cycle.py.
"""Momentum that falls while the rate of one_cycle rises, and rises while it falls (Smith 2018, arXiv:1803.09820)."""

from dataclasses import dataclass

import torch

from addons.techniques import Technique
from engine.config.errors import UsageError
from engine.config.option import option
from engine.config.run_config import RunConfig


@dataclass(eq=False)
class CycleMomentum(Technique):
    """Set the momentum, or the first beta, of all groups before each update, as torch's OneCycleLR does.

    It depends on the number of completed updates, as the rate does, so there is nothing to save."""

    order = 54
    depends_on_length = True

    base_momentum: float = option("momentum at the highest rate", 0.85, min=0, below=1)
    max_momentum: float = option("momentum at the start, in the warmup and at the end", 0.95, min=0, below=1)

    def change_model(self, model: torch.nn.Module, cfg: RunConfig) -> None:
        if cfg.lr_scheduler_type != "one_cycle":
            raise UsageError(
                f"techniques: cycle_momentum follows lr_scheduler_type one_cycle, but it is {cfg.lr_scheduler_type}"
            )

    def check(self) -> None:
        if not any({"betas", "momentum"} & group.keys() for group in self.run.optimizer.param_groups):
            raise UsageError(
                f"techniques: cycle_momentum: optim is {self.run.cfg.optim}, which has neither betas nor momentum to set"
            )

    def begin(self) -> None:
        from addons.schedules.one_cycle import one_cycle_momentum

        self.momentum = one_cycle_momentum(self.run.cfg, self.run.num_steps, self.base_momentum, self.max_momentum)

    def change_gradient(self) -> None:
        momentum = self.momentum(self.run.state.updates)
        for group in self.run.optimizer.param_groups:
            if "momentum" in group:
                group["momentum"] = momentum
            if "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])
