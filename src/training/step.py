"""One optimizer step: totals over all ranks, exact gradient of the global batch, clipping, update or skip.

Tests: tests/training/test_step.py and tests/conformance/.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from src.config.schema import RunConfig
from src.data.batch_plan import hash_ids
from src.data.data_loader import seed_everything
from src.distributed.host_group import HostGroup
from src.distributed.strategies import Strategy
from src.models.compile_and_recompute import compile_and_recompute
from src.runtime import private_apis
from src.tasks import Task
from src.training import batch_loss
from src.training.batch_loss import BatchLoss, LossesAndSums
from src.training.train_state import DeviceFlag, StepLosses, Window, widen


class ModelWithLoss(torch.nn.Module):
    """The module that Accelerate wraps: a model and the task's loss in one forward pass.

    Because the loss is inside, no wrapper converts, gathers or keeps logits."""

    def __init__(self, model: torch.nn.Module, task: Task):
        super().__init__()
        self.model, self.task = model, task
        # What couples the rows of a global batch in training; None: the loss is a sum over rows.
        self.batch_loss: BatchLoss | None = task if task.has_batch_loss else None
        private_apis.set_layer_class_names(self, private_apis.layer_class_names(self))
        self.tied = tied_names(model)

    def tie_weights(self) -> None:
        """Tie weights again: accelerate shards a copy of the model on the meta device, which has lost the ties."""
        for first, *others in self.tied:
            parameter = self.model.get_parameter(first)
            for name in others:
                path, _, leaf = name.rpartition(".")
                self.model.get_submodule(path).register_parameter(leaf, parameter)

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.batch_loss and (self.training or self.task.has_batch_loss):
            return self.batch_loss.represent(self.model, inputs)
        return self.task.loss(self.model, inputs)


def tied_names(model: torch.nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def build_model(
    cfg: RunConfig,
    strategy: Strategy,
    task: Task,
    weights: str | Path | None,
    change_model: Callable[[ModelWithLoss, RunConfig], None],
) -> ModelWithLoss:
    """Return the task's model and loss in one module, changed by `change_model`, then compiled and with activation
    checkpointing as `cfg` says."""
    model = strategy.build_model(task, weights)
    model_with_loss = ModelWithLoss(model, task)
    change_model(model_with_loss, cfg)
    compile_and_recompute(model, cfg, strategy.accelerator.device)
    return model_with_loss


class StepTotals(NamedTuple):
    """Sums over all ranks, from one small all-reduce before the forward passes of a step."""

    weight: float  # targets (tokens, rows, ...) in the global batch; the loss is divided by it
    tokens: float
    padded_tokens: float  # tokens and padding
    examples: float  # 0: a streamed dataset has no rows left in this pass
    hash_low: float  # with hash_high: a hash of the example ids, for ledger.jsonl
    hash_high: float
    save: float  # ranks that were asked for a checkpoint
    stop: float  # ranks that were asked to stop
    failed: float  # ranks on which too many checkpoints in a row could not be written
    forwards: list[float]  # micro-batches of each rank; empty if ranks may run different numbers of them

    @classmethod
    def sum_over_ranks(
        cls, hosts: HostGroup, strategy: Strategy, window: Window, requests: list[float], failed: float
    ) -> "StepTotals":
        """Sum the windows' counts, `requests` [save, stop] and `failed` over all ranks; a collective.

        Every input of a decision is summed here, so ranks never disagree. Sums of whole numbers are exact."""
        forwards = strategy.forwards_per_rank(window)
        sums = hosts.sum([*window_counts(window), *requests, failed, *forwards]).tolist()
        return cls(*sums[:9], forwards=sums[9:])


def compute_gradient(strategy: Strategy, module: torch.nn.Module, window: Window, total_weight: float) -> StepLosses:
    """Fill `.grad` with the gradient of (sum of losses) / (sum of weights) over all ranks; return this rank's losses.

    `total_weight` is the sum of weights over all ranks. The loss is multiplied by the number of data parallel ranks,
    because backends average gradients over them. A non-finite loss on one rank makes the gradient of every rank
    non-finite. Every forward pass begins with the buffers of the step before; then they are set to the mean over the
    micro-batches. Nothing here waits for the device."""
    model_with_loss = getattr(module, "module", module)  # inside the wrapper of DDP or DeepSpeed
    backward = batch_loss.backward_in_two_passes if model_with_loss.batch_loss else _backward
    try:
        with strategy.step():
            losses, sums = backward(strategy, module, window, total_weight)
    except RuntimeError as error:  # perhaps out of memory
        vars(error)["smaller_batch"] = smaller_batch(strategy.cfg, window)  # for the last line that this rank prints
        raise
    return StepLosses(widen(torch.stack(losses)), {name: widen(value) for name, value in sums.items()})


def smaller_batch(cfg: RunConfig, window: Window) -> str:
    """Return the flag with which the next start needs less memory, in words."""
    rows = max(len(micro.ids) for micro, _ in window)
    if rows == 1:
        return "--gradient_checkpointing true, or shorter rows"
    size = f"size {rows // 2}"
    if cfg.per_device_batch_tokens:
        size = f"tokens {cfg.per_device_batch_tokens // 2}"
    return f"--per_device_batch_{size} (the global batch stays the same, with more accumulation)"


def _backward(strategy: Strategy, module: torch.nn.Module, window: Window, total_weight: float) -> LossesAndSums:
    """Do what `compute_gradient` does for a loss that is a sum over rows."""
    scale = strategy.data_world_size / total_weight
    device, losses, sums = strategy.accelerator.device, [], {}
    for micro, batch in window:
        inputs = {name: value.to(device, non_blocking=True) for name, value in batch.inputs.items()}
        seed_everything(micro.seed)
        with strategy.gradient_sync(module, micro.last):
            out = module(inputs)
            loss = out["loss"]
            # The factor is exactly `scale`, or NaN if the loss is not finite. An infinite loss can have a finite
            # gradient, which only this rank would notice; the all-reduce of gradients takes the NaN to all ranks.
            factor = 0.0 * loss.detach() + (0.0 if micro.dummy else scale)
            strategy.backward(module, loss * factor, micro)
        losses.append(torch.zeros_like(loss) if micro.dummy else loss.detach())
        for name, value in batch_loss.further_sums(out).items() if not micro.dummy else ():
            sums[name] = sums.get(name, 0.0) + widen(value)
    return losses, sums


def optimizer_step(
    strategy: Strategy, module: torch.nn.Module, optimizer, learning_rate: float, max_grad_norm: float
) -> tuple[torch.Tensor, DeviceFlag]:
    """Clip, update and clear the gradient; return (its norm before clipping, whether the update was skipped).

    An update with a gradient norm that is not finite is skipped: weights and moments stay unchanged on all ranks."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_factor"]  # of Strategy.prepare
    norm, skipped = strategy.clip_and_step(module, optimizer, max_grad_norm)
    return norm, DeviceFlag(skipped)


def window_counts(window: Window) -> list[float]:
    """Return [weight, tokens, padded_tokens, examples, hash_low, hash_high] of this rank's window."""
    real = [(micro, batch) for micro, batch in window if not micro.dummy]
    sums = [sum(float(getattr(batch, name)) for _, batch in real) for name in ("weight", "tokens", "padded_tokens")]
    ids = np.concatenate([micro.ids for micro, _ in real]) if real else np.zeros(0, np.int64)
    return [*sums, float(len(ids)), *hash_ids(ids)]
