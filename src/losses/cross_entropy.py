"""Cross-entropy of training with its options: label smoothing, z-loss, focal loss, class weights; and R-Drop.

A task has these options if its Options inherit from CrossEntropy or ClassCrossEntropy. Evaluation reports the plain
cross-entropy. Tests: tests/src/losses/test_cross_entropy.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.config.errors import UsageError
from engine.config.option import option
from engine.rows.tokenize_and_pack import IGNORED


@dataclass
class CrossEntropy:
    """Loss of a target: Σ over classes c of q_c w_c (1 − p_c)^focal_gamma (−log p_c) + w z_loss (log Σ exp logits)².

    p are the model's probabilities, q is 1 for the target and 0 for the others, smoothed as in torch's cross_entropy
    (Szegedy et al. 2016); the focal factor is that of Lin et al. 2017, the z-loss that of PaLM (Chowdhery et al. 2022)
    and ST-MoE (Zoph et al. 2022). w are the class weights, and w alone that of the target: 1 without
    ClassCrossEntropy."""

    label_smoothing_factor: float = option(
        "probability spread over all classes, in the training loss only", 0.0, min=0, below=1
    )
    z_loss: float = option(
        "weight of (log of the softmax's denominator)² in the training loss, such as 1e-4", 0.0, min=0
    )
    focal_gamma: float = option(
        "the training loss of a target is times (1 − its probability) to this power", 0.0, min=0
    )

    @property
    def is_plain_loss(self) -> bool:
        """True if the training loss is the plain cross-entropy."""
        return not (self.label_smoothing_factor or self.z_loss or self.focal_gamma)

    def class_weights_on(self, device: torch.device) -> torch.Tensor | None:
        """Return the class weights in float64 on a device, None if there are none."""
        return None

    def per_target(self, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the `loss` of each target, (rows,), and without gradient `cross_entropy` (the plain one, times class
        weights) and `z_loss`, as far as the options make them differ.

        logits (rows, classes) in float32 or better, targets (rows,). All values are zero for a target of -100."""
        if self.is_plain_loss:
            return {"loss": F.cross_entropy(logits, targets, reduction="none")}
        log_p = F.log_softmax(logits, -1)
        index = targets.clamp(min=0)
        log_p_target = log_p.gather(-1, index[:, None])[:, 0]
        is_target = (targets != IGNORED).to(log_p.dtype)
        weights = is_target
        class_weights = self.class_weights_on(logits.device)
        if class_weights is not None:
            class_weights = class_weights.to(log_p.dtype)
            weights = weights * class_weights[index]
        smoothing = self.label_smoothing_factor
        loss = (1 - smoothing) * weights * self._cost(log_p_target)
        if smoothing:
            costs = self._cost(log_p)
            if class_weights is not None:
                costs = costs * class_weights
            loss = loss + smoothing * is_target * costs.mean(-1)
        values = {"cross_entropy": -weights * log_p_target.detach()}
        if self.z_loss:
            log_denominator = logits.gather(-1, index[:, None])[:, 0] - log_p_target
            z_loss = weights * log_denominator.square()
            loss = loss + self.z_loss * z_loss
            values["z_loss"] = z_loss.detach()
        return {"loss": loss} | values

    def sums(self, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the sums of `per_target`."""
        return {name: value.sum() for name, value in self.per_target(logits, targets).items()}

    def _cost(self, log_p: torch.Tensor) -> torch.Tensor:
        """Return the loss of a class if it was the target, by the logarithm of its probability."""
        if not self.focal_gamma:
            return -log_p
        # The bound keeps the gradient finite where a probability is rounded to 1: a power below 1 has none at 0.
        rest = (-torch.expm1(log_p)).clamp(min=torch.finfo(log_p.dtype).tiny)
        return -log_p * rest**self.focal_gamma


PLAIN = CrossEntropy()


@dataclass
class ClassCrossEntropy(CrossEntropy):
    """The options of a task with few classes. The weight of a batch is the sum of its targets' class weights."""

    class_weights: list[str] = option(
        "weight of each class in the training loss, in the order of the model's labels, or balanced: examples / (classes × "
        "examples of the class); the mean is weighted, too",
        [],
        from_checkpoint=False,  # an evaluation does not use it
    )

    @property
    def is_plain_loss(self) -> bool:
        return super().is_plain_loss and not self.class_weights

    def class_weights_on(self, device: torch.device) -> torch.Tensor | None:
        return _on_device(tuple(self.class_weights), device) if self.class_weights else None

    def set_classes(self, labels: Sequence[str], train_set: Any = None, column: str = "") -> None:
        """Replace `balanced` by numbers that `column` of the training rows gives, class ids or lists of them.

        Rows of a mixture count once each, whatever the weight of their source. A class without rows has the weight 0.
        Raise UsageError unless there is then one weight of 0 or more for each class, not all 0, or none at all."""
        sources = [rows for _, _, rows in train_set.segments()] if train_set is not None else []
        if self.class_weights == ["balanced"] and sources:
            weights = balanced_weights((rows.values(column) for rows in sources), len(labels))
            self.class_weights = [repr(weight) for weight in weights]
        if self.class_weights and not are_class_weights(self.class_weights, len(labels)):
            raise UsageError(
                f"class_weights is {', '.join(self.class_weights)}, but there are {len(labels)} classes: give a number of 0 "
                f"or more for each, not all 0, in this order: {', '.join(labels[:20])}; or balanced, which counts no "
                "streams and no pixels"
            )

    def weigh(
        self, training: bool, targets: np.ndarray, others: np.ndarray | None = None, shares: np.ndarray | float = 1.0
    ) -> float:
        """Return the weight of a batch: in training the sum of its class weights, else the number of its targets.

        With `others` (mixup), a target has the weight of its two classes in their `shares`."""
        is_target = targets != IGNORED
        if not training or not self.class_weights:
            return int(is_target.sum())
        weights = np.array([float(value) for value in self.class_weights])
        total = (shares * weights[targets.clip(min=0)] * is_target).sum()
        if others is not None:
            total += ((1 - shares) * weights[others]).sum()
        return float(total)


def balanced_weights(class_ids: Iterable[np.ndarray], num_classes: int) -> list[float]:
    """Return examples / (classes × examples of the class) for each class, 0 for one without examples.

    class_ids: those of all examples, an array for each source; negative ids are no class."""
    counts = np.zeros(num_classes)
    for ids in class_ids:
        counts += np.bincount(ids[ids >= 0], minlength=num_classes)
    weights = counts.sum() / (num_classes * counts.clip(min=1))
    return [float(weight) for weight in np.where(counts, weights, 0.0)]


def are_class_weights(texts: list[str], num_classes: int) -> bool:
    """Return whether these are a number of 0 or more for each class, not all 0."""
    try:
        weights = [float(text) for text in texts]
    except ValueError:
        return False
    return len(weights) == num_classes and min(weights) >= 0 and 0 < sum(weights) < float("inf")


@cache
def _on_device(weights: tuple[str, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([float(weight) for weight in weights], dtype=torch.float64, device=device)


def at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    """Return logits of 16 bits in float32, others unchanged."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


# ---- R-Drop: a batch runs twice with two dropout masks, and its predictions are drawn together (Liang et al. 2021) ----


def r_drop_option() -> float:
    """Declare the option `r_drop_alpha` of a task."""
    return option(
        "R-Drop: run every row twice with different dropout; weight of the divergence of both predictions; 0: once",
        0.0,
        min=0,
    )


def twice(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the rows of a batch, and then the same rows again."""
    return {name: torch.cat([value, value]) for name, value in inputs.items()}


def r_drop_sums(sums: dict[str, torch.Tensor], logits: torch.Tensor, alpha: float) -> dict[str, torch.Tensor]:
    """Return the training sums of rows that ran `twice`, (2 × rows, classes): half of `sums`, and `alpha` × `r_drop`.

    `r_drop` is the sum over rows of (KL(p ‖ q) + KL(q ‖ p)) / 2, where p and q are the predictions of both passes."""
    log_p, log_q = at_least_float32(logits).log_softmax(-1).chunk(2)
    divergence = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum() / 2
    halves = {name: value / 2 for name, value in sums.items()}
    return halves | {"loss": halves["loss"] + alpha * divergence, "r_drop": divergence.detach()}
