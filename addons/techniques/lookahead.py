"""Lookahead: slow weights that follow the weights of any optimizer every k steps."""

from dataclasses import dataclass

import torch

from addons.techniques import Technique
from addons.techniques._weight_copies import TrainedTensors, assign
from engine.config.option import option


@dataclass(eq=False)
class Lookahead(Technique):
    """Every `k` steps move the slow weights towards the weights by the share `alpha`, and continue from there.

    Reference: Zhang et al. 2019, https://arxiv.org/abs/1907.08610. The optimizer keeps its moments. A step with an update that
    is skipped counts, too. Keeps one copy of the trained weights."""

    order = 70

    k: int = option("steps between two moves of the slow weights", 10, min=1)
    alpha: float = option("share of the way from the slow weights to the weights", 0.5, above=0, max=1)

    copies = 1

    def begin(self) -> None:
        self.trained = TrainedTensors(self.run, buffers=False)
        self.slow = self.trained.copy()

    def after_update(self, skipped: torch.Tensor) -> None:
        if self.run.state.step % self.k == 0:
            self.trained.move(self.slow, self.trained.now(), self.alpha)
            assign(self.trained.now(), self.slow)

    def state_dict(self) -> dict:
        return {f"slow/{name}": value for name, value in self.slow.items()}

    def load_state_dict(self, state: dict) -> None:
        assign(self.slow, {name: state[f"slow/{name}"] for name in self.slow})
