"""Latest weight averaging (LAWA): the mean of the weights of the last k checkpoints."""

from dataclasses import dataclass

import torch

from addons.techniques import Technique
from addons.techniques._weight_copies import Tensors, TrainedTensors, assign
from engine.config.option import option


@dataclass(eq=False)
class LAWA(Technique):
    """Average the weights of the last `k` of the steps `every`, 2 * `every`, …

    Reference: Kaddour 2022, https://arxiv.org/abs/2209.14981. Keeps k copies of the trained weights on the device and
    in each checkpoint. Until the first copy is taken, the average is the weights of training."""

    order = 73

    k: int = option("number of copies that are averaged", 6, min=2)
    every: int = option("steps between two copies", 100, min=1)
    final: bool = option("final/ holds the average instead of the weights of training", False)

    def __post_init__(self):
        self.copies = self.k

    def begin(self) -> None:
        self.trained = TrainedTensors(self.run)
        self.ring, self.count = [self.trained.copy() for _ in range(self.k)], 0

    def after_update(self, skipped: torch.Tensor) -> None:
        if self.run.state.step % self.every == 0:
            assign(self.ring[self.count % self.k], self.trained.now())
            self.count += 1

    def average(self) -> Tensors:
        if not self.count:
            return {}
        mean = self.trained.copy()
        for number, weights in enumerate(self.ring[: self.count]):
            if number:
                self.trained.move(mean, weights, 1 / (number + 1))
            else:
                assign(mean, weights)
        return mean

    def state_dict(self) -> dict:
        copies = {f"{i}/{name}": value for i, weights in enumerate(self.ring) for name, value in weights.items()}
        return {"count": self.count} | copies

    def load_state_dict(self, state: dict) -> None:
        self.count = state["count"]
        for i, weights in enumerate(self.ring):
            assign(weights, {name: state[f"{i}/{name}"] for name in weights})
