"""Losses of single rows and tokens, in chunks of logits: cross-entropy, log-probabilities, divergence from a teacher.

Tests: tests/models/test_token_losses.py and tests/addons/techniques/test_batch_loss.py.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from src.models.cross_entropy import IGNORED, PLAIN, CrossEntropy
from src.models.losses import at_least_float32, chunk_rows, recomputed
from src.runtime.private_apis import known_masks


class Scored(NamedTuple):
    """What a language model computes for a micro-batch: hidden states (rows, features) and the head on them.

    Without a head, the hidden states are the logits."""

    hidden: torch.Tensor
    head: torch.nn.Linear | None

    def chunks(self, rows: int) -> Iterator[tuple[torch.Tensor | None, ...]]:
        """Yield (hidden states, weight, bias) for each `rows` rows."""
        head = (None, None) if self.head is None else (self.head.weight, self.head.bias)
        return ((hidden, *head) for hidden in self.hidden.split(rows))

    def rows_per_chunk(self) -> int:
        vocabulary = self.hidden.shape[-1] if self.head is None else self.head.weight.shape[0]
        return chunk_rows(self.hidden.device.type, vocabulary)


def score_tokens(model: torch.nn.Module, inputs: dict[str, torch.Tensor], plain_head: bool) -> Scored:
    """Run a language model on `input_ids` and `position_ids` of packed rows; the head runs only if it is not linear."""
    positions = inputs.get("position_ids")
    arguments = {"input_ids": inputs["input_ids"], "position_ids": positions, "use_cache": False}
    with known_masks(packed=positions is not None):
        output = model.base_model(**arguments) if plain_head else model(**arguments)
    if plain_head:
        return Scored(output.last_hidden_state.flatten(0, 1), model.get_output_embeddings())
    return Scored(output.logits.flatten(0, 1), None)


def token_log_probs(scored: Scored, targets: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each target, (rows,), float32 or better; zero for a target of -100."""
    rows = scored.rows_per_chunk()
    chunks = zip(scored.chunks(rows), targets.split(rows), strict=True)
    return torch.cat([recomputed(_log_probs_of_chunk, *one, chosen) for one, chosen in chunks])


def distillation_terms(
    student: Scored, teacher: Scored, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (KL divergence, cross-entropy, 1 if predicted correctly) of each row, zero for a target of -100.

    The divergence is that of the teacher's distribution at `temperature` from the student's."""
    rows = student.rows_per_chunk()
    chunks = zip(student.chunks(rows), teacher.chunks(rows), targets.split(rows), strict=True)
    terms = [recomputed(_terms_of_chunk, *one, *other, chosen, temperature) for one, other, chosen in chunks]
    kl, cross_entropy, correct = (torch.cat(values) for values in zip(*terms, strict=True))
    return kl, cross_entropy, correct


def row_losses(
    hidden: torch.Tensor,
    head: torch.nn.Linear | None,
    targets: torch.Tensor,
    options: CrossEntropy = PLAIN,
    class_weights: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return `loss` and `weight` of each row, (rows,), which add up to the training loss and the weight of the batch.

    targets (rows, …); hidden (number of targets, features), of which only a chunk of the logits `head(hidden)` exists
    at a time. Without a head, `hidden` are the logits. Targets of -100 are ignored."""
    flat = targets.flatten()
    if head is None:
        losses = options.per_target(at_least_float32(hidden), flat, class_weights)["loss"]
    else:
        size = chunk_rows(hidden.device.type, head.weight.shape[0])
        chunks = zip(hidden.split(size), flat.split(size), strict=True)
        losses = torch.cat([recomputed(_losses_of_chunk, h, head.weight, head.bias, t, options) for h, t in chunks])
    weights = (targets != IGNORED).long()
    if class_weights is not None:
        weights = weights * class_weights[targets.clamp(min=0)]
    found = {"loss": losses.view_as(targets), "weight": weights}
    return {name: values.reshape(len(targets), -1).sum(1) for name, values in found.items()}


def _logits(hidden: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    return at_least_float32(hidden if weight is None else F.linear(hidden, weight, bias))


def _log_probs_of_chunk(hidden, weight, bias, targets: torch.Tensor) -> torch.Tensor:
    return -F.cross_entropy(_logits(hidden, weight, bias), targets, reduction="none")


def _terms_of_chunk(hidden, weight, bias, other, other_weight, other_bias, targets: torch.Tensor, temperature: float):
    student, teacher = _logits(hidden, weight, bias), _logits(other, other_weight, other_bias)
    log_student = F.log_softmax(student / temperature, -1)
    log_teacher = F.log_softmax(teacher / temperature, -1)
    kl = F.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(-1)
    cross_entropy = F.cross_entropy(student, targets, reduction="none")
    return kl * (targets != -100), cross_entropy, student.argmax(-1) == targets


def _losses_of_chunk(hidden, weight, bias, targets: torch.Tensor, options: CrossEntropy) -> torch.Tensor:
    return options.per_target(at_least_float32(F.linear(hidden, weight, bias)), targets)["loss"]
