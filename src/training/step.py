"""One optimizer step: the exact gradient of a global batch, clip, update or skip.

Tests: tests/training/test_step.py and tests/conformance/.
"""

import numpy as np
import torch

from src.data.batch_plan import hash_ids
from src.data.data_loader import seed_everything
from src.distributed import tensor_parallel
from src.distributed.strategies import backward, gradient_sync
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
        """Make tied weights one again: accelerate shards a copy of the model on torch's meta device, where they are two."""
        if hasattr(self.model, "tie_weights"):
            self.model.tie_weights()

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.task.loss(self.model, inputs)


def compute_gradient(
    accelerator, module: torch.nn.Module, window: Window, total_weight: float, each: bool = False
) -> torch.Tensor:
    """Leave in `.grad` the gradient of (sum of losses) / (sum of weights) over the global batch; return this rank's losses.

    `total_weight` is that of all ranks. The backend averages gradients over ranks that read other data, which the factor of
    their number cancels. Gradients are reduced once, after the last micro-batch (or, with `each`, after each). A loss that
    is not finite makes the gradient of every rank so. The losses are a float64 vector on the device, one a micro-batch, so
    nothing here waits for the device.
    """
    scale = tensor_parallel.data_parallel_rank_and_size(accelerator)[1] / total_weight
    device, losses = accelerator.device, []
    for micro, batch in window:
        inputs = {name: value.to(device, non_blocking=True) for name, value in batch.inputs.items()}
        seed_everything(micro.seed)
        with gradient_sync(accelerator, module, micro.last, each):
            loss = module(inputs)["loss"]
            # The second factor is exactly the scale, or NaN where the loss is infinite with a finite gradient: what
            # one rank alone would see then travels to all of them in the reduction.
            backward(accelerator, module, loss * (0.0 * loss.detach() + (0.0 if micro.dummy else scale)))
        losses.append(torch.zeros_like(loss) if micro.dummy else loss.detach())
    stacked = torch.stack(losses)
    return (stacked if device.type != "mps" else stacked.cpu()).double()  # mps has no float64


def optimizer_step(
    accelerator, module, optimizer, learning_rate: float, max_grad_norm: float
) -> tuple[torch.Tensor, DeviceFlag]:
    """Clip, step and clear; return the gradient's norm before clipping and whether the step was left out, on the device.

    A step is left out, weights and moments untouched, when the norm is not finite. The norm is that of the reduced
    gradient, so all ranks do the same. Fused optimizers look at it on the device; for others the host has to wait."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    if accelerator.distributed_type.value == "DEEPSPEED":
        from src.distributed import deepspeed

        norm, skipped = deepspeed.update(module)
        return norm, DeviceFlag(skipped)
    clip = tensor_parallel.clip if tensor_parallel.tp_size(accelerator) > 1 else accelerator.clip_grad_norm_
    norm = clip(module.parameters(), max_grad_norm or float("inf"))
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of shards
    skipped = ~torch.isfinite(norm)
    if accelerator.scaler is not None:
        optimizer.step()  # the scaler looks for itself, and waits for the device
        skipped = torch.tensor(accelerator.optimizer_step_was_skipped)
    elif optimizer.defaults.get("fused") and (optimizer.state or not optimizer.defaults.get("momentum")):
        # But for the first step of a momentum, whose memory torch would leave as it found it.
        optimizer.found_inf = skipped.float()
        optimizer.step()
    elif not skipped:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, DeviceFlag(skipped)


def window_counts(window: Window) -> list[float]:
    """Return weight, tokens, padded tokens, examples and the two sums of their ids of this rank's window, before any forward."""
    real = [(micro, batch) for micro, batch in window if not micro.dummy]
    sums = [sum(float(getattr(batch, name)) for _, batch in real) for name in ("weight", "tokens", "padded_tokens")]
    ids = np.concatenate([micro.ids for micro, _ in real]) if real else np.zeros(0, np.int64)
    return [*sums, float(len(ids)), *hash_ids(ids)]
