"""Stochastic weight averaging (SWA): the mean of the weights since a step."""

from dataclasses import dataclass

import torch

from addons.techniques import Technique
from addons.techniques._weight_copies import Tensors, TrainedTensors, assign
from engine.config.errors import UsageError
from engine.config.option import option


@dataclass(eq=False)
class SWA(Technique):
    """Average the weights of every `every`-th step from `start` on, all with the same weight.

    Reference: Izmailov et al. 2018, https://arxiv.org/abs/1803.05407. Set their constant or cyclic learning rate by
    lr_scheduler_type. Until the first weights are taken, the average is the weights of training."""

    order = 72

    start: float = option("first step of the average; below 1: a fraction of all steps", 0.75, min=0)
    every: int = option("steps between the weights that are averaged", 1, min=1)
    final: bool = option("final/ holds the average instead of the weights of training", False)

    copies = 1

    def begin(self) -> None:
        steps = self.run.num_steps
        self.first = round(self.start * steps) if self.start < 1 else round(self.start)
        self.trained = TrainedTensors(self.run)
        self.weights, self.count, self.step = self.trained.copy(), 0, 0

    def after_update(self, skipped: torch.Tensor) -> None:
        self.step = step = self.run.state.step
        if step >= self.first and step % self.every == 0:
            self.count += 1
            if self.count == 1:
                assign(self.weights, self.trained.now())
            else:
                self.trained.move(self.weights, self.trained.now(), 1 / self.count)

    def average(self) -> Tensors:
        return self.weights if self.count else {}

    def state_dict(self) -> dict:
        numbers = {"count": self.count, "first": self.first, "step": self.step}
        return numbers | {f"average/{name}": value for name, value in self.weights.items()}

    def load_state_dict(self, state: dict) -> None:
        """Raise UsageError if the run now has another length, with which the mean so far would have begun elsewhere."""
        if state["first"] != self.first and state["step"] >= self.first:
            raise UsageError(
                f"techniques: swa: with start {self.start:g} the mean of this run began at step {state['first']:,}; now that it has "
                f"{self.run.num_steps:,} steps, it would have begun at step {self.first:,}, which is past: resume with the length "
                f"that it had, or with one whose start is after step {state['step']:,}"
            )
        self.step = state["step"]
        self.count = state["count"] if state["first"] == self.first else 0
        assign(self.weights, {name: state[f"average/{name}"] for name in self.weights})
