"""One optimizer step: the exact gradient of a global batch, then clip, update or skip.

Tests: tests/training/test_step.py and tests/conformance/.
"""

import numpy as np
import torch

from src.data.batch_plan import hash_ids
from src.data.data_loader import seed_everything
from src.distributed.strategies import Strategy
from src.tasks import Task
from src.training.state import DeviceFlag, Window


class ModelWithLoss(torch.nn.Module):
    """The module that Accelerate wraps: a model and the task's loss in one forward pass.

    With the loss inside, no wrapper converts, gathers or keeps logits."""

    def __init__(self, model: torch.nn.Module, task: Task):
        super().__init__()
        self.model, self.task = model, task
        self._no_split_modules = getattr(model, "_no_split_modules", None)  # the units that FSDP2 shards

    def tie_weights(self) -> None:
        """Tie weights again: accelerate shards a copy of the model on torch's meta device, where they are untied."""
        if hasattr(self.model, "tie_weights"):
            self.model.tie_weights()

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.task.loss(self.model, inputs)


def compute_gradient(strategy: Strategy, module: torch.nn.Module, window: Window, total_weight: float) -> torch.Tensor:
    """Leave in `.grad` the gradient of (sum of losses) / (sum of weights) over the global batch; return this rank's losses.

    `total_weight` is the sum over all ranks. Backends average gradients over the ranks that read different data, so the loss
    is scaled up by their number. A non-finite loss on one rank makes the gradient of every rank non-finite. The losses are a
    float64 vector on the device, one per micro-batch: nothing here waits for the device.
    """
    scale = strategy.data_world_size / total_weight
    device, losses = strategy.accelerator.device, []
    for micro, batch in window:
        inputs = {name: value.to(device, non_blocking=True) for name, value in batch.inputs.items()}
        seed_everything(micro.seed)
        with strategy.gradient_sync(module, micro.last):
            loss = module(inputs)["loss"]
            # The factor is exactly the scale, or NaN where the loss is infinite and its gradient finite: what one rank
            # alone would see then reaches all of them in the reduction.
            factor = 0.0 * loss.detach() + (0.0 if micro.dummy else scale)
            strategy.backward(module, loss * factor)
        losses.append(torch.zeros_like(loss) if micro.dummy else loss.detach())
    stacked = torch.stack(losses)
    return (stacked if device.type != "mps" else stacked.cpu()).double()  # mps has no float64


def optimizer_step(
    strategy: Strategy, module: torch.nn.Module, optimizer, learning_rate: float, max_grad_norm: float
) -> tuple[torch.Tensor, DeviceFlag]:
    """Clip, update and clear the gradient; return its norm before clipping, and whether the update was skipped.

    A skipped update, one with a norm that is not finite, leaves weights and moments untouched on all ranks."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    norm, skipped = strategy.clip_and_step(module, optimizer, max_grad_norm)
    return norm, DeviceFlag(skipped)


def window_counts(window: Window) -> list[float]:
    """Return weight, tokens, padded tokens, examples and the two sums of their ids of this rank's window."""
    real = [(micro, batch) for micro, batch in window if not micro.dummy]
    sums = [sum(float(getattr(batch, name)) for _, batch in real) for name in ("weight", "tokens", "padded_tokens")]
    ids = np.concatenate([micro.ids for micro, _ in real]) if real else np.zeros(0, np.int64)
    return [*sums, float(len(ids)), *hash_ids(ids)]
