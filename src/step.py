"""The gradient of one global batch, and the update: the mathematics of training.

Leave alone. Guarded by tests/test_step.py and tests/conformance/.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from src.plan import MicroBatch
from src.reader import seed_everything
from src.tasks import Batch, Task

Window = list[tuple[MicroBatch, Batch]]


class Objective(torch.nn.Module):
    """The module that Accelerate wraps: a model and the task's loss in one forward pass.

    With the loss inside, no wrapper converts, gathers or keeps logits."""

    def __init__(self, model: torch.nn.Module, task: Task):
        super().__init__()
        self.model, self.task = model, task

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.task.loss(self.model, inputs)


@dataclass
class Progress:
    """Where a run is: all of its state besides weights and optimizer."""

    step: int = 0  # global batches of the plan that are done
    updates: int = 0  # those that changed the weights; the schedule goes by them
    skipped: int = 0  # those that did not: no target in the global batch, or an overflow in fp16


def prepare(accelerator, objective: Objective, optimizer: torch.optim.Optimizer):
    """Return both as Accelerate prepares them, without the wrappers that would only cost time here."""
    module, optimizer = accelerator.prepare(objective, optimizer)
    if accelerator.num_processes == 1 and isinstance(module, torch.nn.parallel.DistributedDataParallel):
        # accelerate wraps a group of one on CPU, and then never skips its reductions.
        module = accelerator.unwrap_model(module)
    if accelerator.scaler is None and accelerator.distributed_type.value in ("NO", "MULTI_CPU", "MULTI_GPU"):
        # Without a scaler its wrapper does nothing but search the import path for a package in every step: 0.3 ms.
        optimizer = optimizer.optimizer
    return module, optimizer


def gradient(accelerator, module: torch.nn.Module, window: Window, total_weight: float) -> torch.Tensor:
    """Leave in `.grad` the gradient of (sum of losses) / (sum of weights) over the global batch; return this rank's sum.

    `total_weight` is that of all ranks. The backend averages gradients over ranks, which the factor `num_processes`
    cancels. Gradients are reduced once, after the last micro-batch. The sum is a float64 scalar on the device, so
    nothing here waits for the device.
    """
    scale = accelerator.num_processes / total_weight
    device = accelerator.device
    total = torch.zeros((), dtype=torch.float64, device=device if device.type != "mps" else "cpu")
    for micro, batch in window:
        inputs = {name: value.to(device, non_blocking=True) for name, value in batch.inputs.items()}
        seed_everything(micro.seed)
        with nullcontext() if micro.last else accelerator.no_sync(module):
            loss = module(inputs)["loss"]
            accelerator.backward(loss * (0.0 if micro.filler else scale))
        if not micro.filler:
            total += loss.detach()
    return total


def update(accelerator, module, optimizer, learning_rate: float, max_grad_norm: float) -> tuple[torch.Tensor, bool]:
    """Clip, step and clear; return the gradient's norm before clipping, on the device, and whether weights changed."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    norm = accelerator.clip_grad_norm_(module.parameters(), max_grad_norm or float("inf"))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, not accelerator.optimizer_step_was_skipped


def counts(window: Window) -> list[float]:
    """Return weight, tokens and positions of this rank's window, known before any forward pass."""
    batches = [batch for micro, batch in window if not micro.filler]
    return [sum(float(getattr(batch, name)) for batch in batches) for name in ("weight", "tokens", "positions")]
