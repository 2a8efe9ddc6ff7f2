"""Exponential moving average of the weights (EMA)."""

from dataclasses import dataclass

import torch

from addons.techniques import Technique
from addons.techniques._weight_copies import Tensors, TrainedTensors, assign
from engine.config.option import option


@dataclass(eq=False)
class EMA(Technique):
    """Average the weights after each update: average = decay * average + (1 - decay) * weights.

    Reference: Polyak and Juditsky 1992; torch.optim.swa_utils and timm's ModelEmaV3, which average buffers, too. The
    average begins with the initial weights. A skipped update leaves it unchanged, and the host does not wait to
    know."""

    order = 71

    decay: float = option("share of the average that an update keeps", 0.999, min=0, below=1)
    warmup: bool = option("decay at most (1 + n) / (10 + n) after n updates, as in TensorFlow", False)
    final: bool = option("final/ holds the average instead of the weights of training", False)

    copies = 1

    def begin(self) -> None:
        self.trained = TrainedTensors(self.run)
        self.weights = self.trained.copy()
        self.updates = torch.zeros((), dtype=torch.float64, device=self.trained.device)

    @torch.no_grad()
    def after_update(self, skipped: torch.Tensor) -> None:
        done = ~skipped.to(self.updates.device, non_blocking=True)
        decay = (1 + self.updates) / (10 + self.updates) if self.warmup else torch.ones_like(self.updates)
        self.updates += done
        self.trained.move(self.weights, self.trained.now(), done * (1 - decay.clamp(max=self.decay)))

    def average(self) -> Tensors:
        return self.weights

    def state_dict(self) -> dict:
        return {"updates": self.updates} | {f"average/{name}": value for name, value in self.weights.items()}

    def load_state_dict(self, state: dict) -> None:
        self.updates.copy_(state["updates"])
        assign(self.weights, {name: state[f"average/{name}"] for name in self.weights})
