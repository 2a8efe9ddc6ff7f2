"""Distillation: a small language model learns from the distributions of a larger one, its teacher.

loss = alpha · T² · KL(teacher ‖ student, both at temperature T) + (1 − alpha) · cross-entropy, summed over target
tokens (Hinton et al. 2015). Rows are those of causal_lm. Tests: tests/addons/tasks/test_distillation.py.
"""

from dataclasses import dataclass

import torch

from addons.tasks.distillation.frozen_teacher import TaughtTask
from addons.tasks.distillation.token_terms import distillation_terms
from engine.config.errors import UsageError
from engine.config.option import option
from engine.rows.tokenize_and_pack import IGNORED
from src.tasks import causal_lm


@dataclass
class Options(causal_lm.Options):
    # may_change_on_resume, because teacher_revision tells whether the teacher's weights are the same.
    teacher_name_or_path: str | None = option(
        "Hub id, folder or run of the teacher, which has the student's vocabulary",
        is_path=True,
        may_change_on_resume=True,
        from_checkpoint=True,
    )
    teacher_revision: str | None = option(
        "branch, tag or commit of a Hub teacher (default: main); of a folder the hash of its weights, filled in",
        from_checkpoint=True,
    )
    distillation_alpha: float = option("share of the teacher in the loss; the rest is cross-entropy", 0.5, min=0, max=1)
    distillation_temperature: float = option("divides the logits of both models in the teacher's share", 2.0, above=0)

    def check(self) -> list[str]:
        if not self.is_plain_loss:
            return ["distillation has no label_smoothing_factor, z_loss or focal_gamma: remove them"]
        if self.teacher_name_or_path:
            return []
        return ["teacher_name_or_path is missing: distillation needs a teacher, a Hub id or the folder of a model"]


class Task(TaughtTask):
    def load(self) -> None:
        super().load()
        if self.router.coefficient:
            raise UsageError("distillation has no load-balancing loss of experts: give --router_aux_loss_coef 0")

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kl, cross_entropy, correct = self._terms(model, inputs)
        sums = {"kl": kl.sum(), "cross_entropy": cross_entropy.sum()}
        sums["loss"] = self._mixed(*sums.values())
        return sums if model.training else sums | {"correct": correct.sum()}

    def row_losses(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kl, cross_entropy, _ = self._terms(model, inputs)
        losses = self._mixed(kl, cross_entropy).view_as(inputs["targets"])
        return {"loss": losses.sum(1), "weight": (inputs["targets"] != IGNORED).sum(1)}

    def _mixed(self, kl: torch.Tensor, cross_entropy: torch.Tensor) -> torch.Tensor:
        alpha, temperature = self.options.distillation_alpha, self.options.distillation_temperature
        return alpha * temperature**2 * kl + (1 - alpha) * cross_entropy  # gradients shrink with its square

    def _terms(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return (divergence, cross-entropy, whether it is correct) of each target, zero for a target of -100."""
        targets, temperature = inputs["targets"].flatten(), self.options.distillation_temperature
        terms = distillation_terms(*self.score_both(model, inputs), targets, temperature)
        return terms if model.training else tuple(term.double() for term in terms)

    def metrics(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        of_student = super().metrics(sums | {"loss": sums["cross_entropy"]}, weight)
        return of_student | {"kl": sums["kl"] / weight}
