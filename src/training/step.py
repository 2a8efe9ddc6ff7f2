"""What a step of train.py needs: the model with its loss in one module, totals over all ranks, this rank's losses.

Tests: tests/training/test_step.py and tests/conformance/.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from src.config.schema import RunConfig
from src.data.data_loader import StepBatch
from src.distributed.strategies import Strategy
from src.models.compile_and_recompute import compile_and_recompute
from src.runtime import private_apis
from src.tasks import Task


class ModelWithLoss(torch.nn.Module):
    """The module that Accelerate wraps: a model and the task's loss in one forward pass.

    Because the loss is inside, no wrapper converts, gathers or keeps logits."""

    def __init__(self, model: torch.nn.Module, task: Task):
        super().__init__()
        self.model, self.task = model, task
        self.training_loss: Callable[..., dict[str, torch.Tensor]] | None = None  # of an add-on, instead of `task.loss`
        private_apis.set_layer_class_names(self, private_apis.layer_class_names(self))
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self.tied = [several for several in names.values() if len(several) > 1]  # names of the same parameter

    def tie_weights(self) -> None:
        """Tie weights again: accelerate shards a copy of the model on the meta device, which has lost the ties."""
        for first, *others in self.tied:
            parameter = self.model.get_parameter(first)
            for name in others:
                path, _, leaf = name.rpartition(".")
                self.model.get_submodule(path).register_parameter(leaf, parameter)

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        loss = self.training_loss if self.training and self.training_loss else self.task.loss
        return loss(self.model, inputs)


def build_model(
    cfg: RunConfig,
    strategy: Strategy,
    task: Task,
    weights: str | Path | None,
    change_model: Callable[[ModelWithLoss, RunConfig], None],
) -> ModelWithLoss:
    """Return the task's model and loss in one module, changed by `change_model`, then compiled and with activation
    checkpointing as `cfg` says."""
    model = ModelWithLoss(strategy.build_model(task, weights), task)
    change_model(model, cfg)
    compile_and_recompute(model.model, cfg, strategy.accelerator.device)
    return model


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
    def sum_over_ranks(cls, strategy: Strategy, batch: StepBatch, requests: list[float], failed: float) -> "StepTotals":
        """Sum the counts of the micro-batches, `requests` [save, stop] and `failed` over all ranks; a collective.

        Every input of a decision is summed here, so ranks never disagree. Sums of whole numbers are exact."""
        forwards = strategy.forwards_per_rank(batch)
        sums = strategy.hosts.sum([*batch_counts(batch), *requests, failed, *forwards]).tolist()
        return cls(*sums[:9], forwards=sums[9:])


def batch_counts(batch: StepBatch) -> list[float]:
    """Return [weight, tokens, padded_tokens, examples, hash_low, hash_high] of this rank's micro-batches."""
    counts = [0.0] * 6
    for micro, rows in batch:
        if not micro.dummy:
            more = (rows.weight, rows.tokens, rows.padded_tokens, len(micro.ids), *micro.hash)
            counts = [count + value for count, value in zip(counts, more, strict=True)]
    return counts


class StepLosses(NamedTuple):
    """What the task returned for this rank's micro-batches of a step, on the device."""

    losses: torch.Tensor  # one per micro-batch
    sums: dict[str, torch.Tensor]  # its further sums (0-d), added over the micro-batches

    @classmethod
    def of(cls, batch: StepBatch, outputs: list[dict[str, torch.Tensor]]) -> "StepLosses":
        """Return the losses and further sums (0-d) of each micro-batch in one; dummy batches count as 0."""
        real = [(out, micro.dummy) for (micro, _), out in zip(batch, outputs, strict=True)]
        losses = [torch.zeros_like(out["loss"]) if dummy else out["loss"] for out, dummy in real]
        sums: dict[str, Any] = {}
        for out, dummy in real:
            for name, value in out.items():
                if name != "loss" and not dummy:
                    sums[name] = sums[name] + widen(value) if name in sums else widen(value)
        return cls(torch.stack(losses) if len(losses) > 1 else losses[0][None], sums)


def widen(value: torch.Tensor) -> torch.Tensor:
    """Return `value` in float64, without its graph, on its device; on the CPU if it is on mps, which has no float64."""
    value = value.detach()
    return (value.cpu() if value.device.type == "mps" else value).double()
