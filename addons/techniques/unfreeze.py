"""Gradual unfreezing: some parameters are trained only from a step on (ULMFiT, Howard and Ruder 2018)."""

from dataclasses import dataclass

import torch

from addons.techniques import Compute, Technique
from engine.config.errors import UsageError
from engine.config.option import option
from engine.config.run_config import RunConfig
from engine.run.totals_and_votes import StepBatch, StepLosses, StepTotals
from src.training.optimizers import first_match, named_parameters


@dataclass(eq=False)
class Unfreeze(Technique):
    """Drop the gradient of matching parameters until their step: no update, decay or moments, and no part of the norm.

    They count as trainable from the start, because neither DDP nor FSDP2 notices a later change: the backward pass
    costs as much as without freezing. Adam's bias correction begins at their own first step; the schedule is that of
    the run."""

    order = 50

    steps: dict | None = option("{PATTERN: first step that trains it, …}; the first pattern that matches decides")

    def errors(self) -> list[str]:
        if not self.steps:
            return ["steps: give at least one {PATTERN: STEP}"]
        return [
            f"steps: {pattern}: {step!r} is not a step: give a whole number above 0"
            for pattern, step in self.steps.items()
            if isinstance(step, bool) or not isinstance(step, int) or step < 1
        ]

    def change_model(self, model: torch.nn.Module, cfg: RunConfig) -> None:
        steps = self.steps or {}
        patterns = first_match(steps, named_parameters(model), "techniques: unfreeze: steps")
        self.first_step = {name: steps[pattern] for name, pattern in patterns.items()}

    def check(self) -> None:
        """Raise UsageError if no parameter would ever be trained."""
        trainable = [name for name, parameter in named_parameters(self.run.model).items() if parameter.requires_grad]
        first = min((self.first_step.get(name, 0) for name in trainable), default=0)
        if first > self.run.num_steps:
            raise UsageError(
                f"techniques: unfreeze: steps: step {first:,} is after the end of the run, at step {self.run.num_steps:,}: no "
                "parameter would be trained: give smaller steps"
            )

    def around_gradient(self, compute: Compute, batch: StepBatch, totals: StepTotals) -> StepLosses:
        """Drop the gradients inside of both passes of SAM, which would move and count these weights otherwise."""
        losses = compute(batch, totals)
        parameters = named_parameters(self.run.model)
        for name, first in self.first_step.items():
            if self.run.state.step < first:
                parameters[name].grad = None
        return losses
