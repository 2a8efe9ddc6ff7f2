"""Schedule-free learning: an average of the weights instead of momentum and a falling rate (Defazio et al. 2024)."""

from dataclasses import dataclass

import torch

from addons.techniques import Compute, Technique
from addons.techniques._weight_copies import TrainedTensors, assign
from engine.config.errors import UsageError
from engine.config.optimizer_class import arguments_of_fields, find_optimizer
from engine.config.option import option
from engine.config.run_config import RunConfig, field_values
from engine.distributed.sharded_tensors import reshard
from engine.run.totals_and_votes import StepBatch, StepLosses, StepTotals


@dataclass(eq=False)
class ScheduleFree(Technique):
    """Compute gradients at y = z + beta (x - z), update z by the optimizer, and average z into x, the model's weights.

    Reference: https://arxiv.org/abs/2405.15682. Between steps the model has the weights x: evaluations, checkpoints and
    final/ need no other mode. Weight decay acts on z. Keeps z, and in a step a copy of x."""

    order = 10

    beta: float = option("share of the average in the weights at which gradients are computed", 0.9, min=0, below=1)
    power: float = option("weight of update t in the average: t ** power × (highest rate so far) ** 2", 0.0, min=0)

    copies = copies_in_step = 1  # z; x within a step

    def change_model(self, model: torch.nn.Module, cfg: RunConfig) -> None:
        if cfg.dtype == "bfloat16":
            raise UsageError("techniques: schedule_free: dtype is bfloat16, in which small moves of an average vanish")
        if cfg.adam_beta1 and arguments_of_fields(find_optimizer(cfg.optim)[0]):
            raise UsageError(
                f"techniques: schedule_free replaces momentum, but adam_beta1 is {cfg.adam_beta1:g}: give --adam_beta1 0"
            )
        if "cycle_momentum" in field_values(cfg).get("techniques", ()):
            raise UsageError("techniques: schedule_free replaces momentum, which cycle_momentum sets: keep one of them")

    def begin(self) -> None:
        self.trained = TrainedTensors(self.run, buffers=False)
        self.z = self.trained.copy()
        self.weights = torch.zeros(2, dtype=torch.float64, device=self.trained.device)  # updates, sum of their weights
        self.highest_rate = 0.0

    def around_gradient(self, compute: Compute, batch: StepBatch, totals: StepTotals) -> StepLosses:
        reshard(self.run.model)  # an evaluation may have left gathered weights, which are x
        weights = self.trained.now()
        self.x = self.trained.copy()
        assign(weights, self.z)
        self.trained.move(weights, self.x, self.beta)
        losses = compute(batch, totals)
        assign(weights, self.z)
        return losses

    def after_update(self, skipped: torch.Tensor) -> None:
        weights = self.trained.now()
        assign(self.z, weights)
        self.highest_rate = max(self.highest_rate, self.run.state.learning_rate or 0.0)
        done = (~skipped).to(self.weights)
        self.weights[0] += done
        weight = done * self.weights[0] ** self.power * self.highest_rate**2
        self.weights[1] += weight
        share = torch.where(weight > 0, weight / self.weights[1], 0.0)
        assign(weights, self.x)
        self.trained.move(weights, self.z, share.to(next(iter(self.z.values())).dtype))
        del self.x

    def state_dict(self) -> dict:
        state = {f"z/{name}": value for name, value in self.z.items()}
        return state | {"weights": self.weights, "highest_rate": self.highest_rate}

    def load_state_dict(self, state: dict) -> None:
        assign(self.z, {name: state[f"z/{name}"] for name in self.z})
        self.weights.copy_(state["weights"])
        self.highest_rate = state["highest_rate"]
