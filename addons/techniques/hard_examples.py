"""Hard examples: train on the rows of the global batch with the largest losses.

Online hard example mining, Shrivastava et al. 2016, arXiv 1604.03540; selective backprop, Jiang et al. 2019, arXiv
1910.00762. addons/techniques/_batch_loss.py does the work:
a pass without gradient for the losses of all rows, one choice on all ranks, a second pass for the gradient.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from addons.techniques import Compute, Technique
from addons.techniques._batch_loss import Vectors, batch_loss_gradient
from engine.config.errors import UsageError
from engine.config.option import option
from engine.config.run_config import RunConfig
from engine.find_tasks import Task
from engine.plan.seeding import seed_everything
from engine.run.totals_and_votes import StepBatch, StepLosses, StepTotals

TOLERANCE = 1e-3  # of the sum of the rows' losses against the loss: other chunks of 16-bit logits round differently


@dataclass(eq=False)
class HardExamples(Technique):
    """Train on the `share` of the global batch's rows with the largest loss per weight, divided by their weights."""

    order = 30

    share: float = option("share of the rows of the global batch to train on, rounded up", 0.5, above=0, max=1)
    start_step: int = option("first step that chooses; those before train on all rows", 1, min=1)

    def change_model(self, model: torch.nn.Module, cfg: RunConfig) -> None:
        self.hardest = HardestRows(model.task, self.share)

    def begin(self) -> None:
        self.is_checked = False

    def around_gradient(self, compute: Compute, batch: StepBatch, totals: StepTotals) -> StepLosses:
        if not self.is_checked:
            self._check_rows(batch)
            self.is_checked = True
        model, chooses = self.run.model, self.run.state.step >= self.start_step
        model.training_loss = self.hardest.represent if chooses else None
        self.gradient = partial(batch_loss_gradient, self.hardest) if chooses else None
        return compute(batch, totals)

    @torch.no_grad()
    def _check_rows(self, step_batch: StepBatch) -> None:
        """Raise UsageError on all ranks if the rows' losses or weights do not add up to those of a micro-batch."""
        run, (micro, batch) = self.run, step_batch[-1]
        model, backend = run.model, run.backend
        inputs = {name: value.to(backend.accelerator.device) for name, value in batch.inputs.items()}
        outputs = []
        for loss in (self.hardest.represent, None):
            model.training_loss = loss
            seed_everything(micro.seed)
            with backend.buffers.unchanged():
                outputs.append((run.module if backend.is_sharded else model)(inputs))
        sums = [float(outputs[0][name].double().sum()) for name in ("loss", "weight")]
        right = [float(outputs[1]["loss"]), batch.weight]
        is_wrong = any(abs(a - b) > TOLERANCE * abs(b) for a, b in zip(sums, right, strict=True))
        if run.hosts.sum([float(is_wrong)])[0]:
            raise UsageError(
                f"techniques: hard_examples: `row_losses` of task {run.cfg.task} adds up to a loss of {sums[0]:.6g} and a weight "
                f"of {sums[1]:.6g}, but the first micro-batch has {right[0]:.6g} and {right[1]:.6g}: an option of the task "
                "(such as r_drop_alpha) changes the loss in a way that `row_losses` does not know"
            )


class HardestRows:
    """The loss of the hardest rows as a loss over the global batch, as BatchLossTask has it.

    The task's `row_losses(model, inputs)` returns `loss` and `weight` of each row in training, (rows,), which add up to
    the `loss` that its `loss` returns and to the batch's weight; src/losses/chunked_cross_entropy.py computes them for a
    cross-entropy."""

    def __init__(self, task: Task, share: float):
        """Raise UsageError if the task does not define `row_losses`."""
        self.share = share
        self.row_losses: Any = getattr(task, "row_losses", None)
        if self.row_losses is None:
            raise UsageError(
                f"techniques: hard_examples needs the losses of single rows, which task {task.cfg.task} does not have: remove "
                "it, or define `row_losses` in the task"
            )

    def represent(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> Vectors:
        return self.row_losses(model, inputs)

    def batch_loss(self, vectors: Vectors, weight: float) -> dict[str, torch.Tensor]:
        """Return the mean loss of the chosen rows times `weight`; the mean loss of all rows and the chosen weight, too.

        Equal losses are chosen in the order of the plan, losses that are not finite first, rows without targets
        last."""
        losses = vectors["loss"]
        weights = vectors["weight"].detach().to(losses.dtype)
        hardness = torch.where(weights > 0, losses.detach() / weights, -math.inf)
        rows = max(1, math.ceil(self.share * len(losses) - 1e-9))
        chosen = hardness.argsort(descending=True, stable=True)[:rows]
        chosen_weight = weights[chosen].sum()
        loss = losses[chosen].sum() * (weight / chosen_weight)
        return {"loss": loss, "all_rows_loss": losses.sum(), "chosen_weight": chosen_weight}
