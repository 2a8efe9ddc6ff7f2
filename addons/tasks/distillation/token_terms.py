"""Log-probabilities of tokens and their divergence from a teacher, in chunks of logits.

Used by the tasks distillation and preference. Tests: tests/addons/tasks/test_token_terms.py.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from src.losses.chunked_cross_entropy import Scored, chunk_rows, recomputed
from src.losses.cross_entropy import at_least_float32


def token_log_probs(scored: Scored, targets: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each target, (rows,), float32 or better; zero for a target of -100."""
    rows = _rows_per_chunk(scored)
    chunks = zip(_chunks(scored, rows), targets.split(rows), strict=True)
    return torch.cat([recomputed(_log_probs_of_chunk, *one, chosen) for one, chosen in chunks])


def distillation_terms(
    student: Scored, teacher: Scored, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (KL divergence, cross-entropy, 1 if predicted correctly) of each row, zero for a target of -100.

    The divergence is that of the teacher's distribution at `temperature` from the student's."""
    rows = _rows_per_chunk(student)
    chunks = zip(_chunks(student, rows), _chunks(teacher, rows), targets.split(rows), strict=True)
    terms = [recomputed(_terms_of_chunk, *one, *other, chosen, temperature) for one, other, chosen in chunks]
    kl, cross_entropy, correct = (torch.cat(values) for values in zip(*terms, strict=True))
    return kl, cross_entropy, correct


def _rows_per_chunk(scored: Scored) -> int:
    vocabulary = scored.hidden.shape[-1] if scored.head is None else scored.head.weight.shape[0]
    return chunk_rows(scored.hidden.device.type, vocabulary)


def _chunks(scored: Scored, rows: int) -> Iterator[tuple[torch.Tensor | None, ...]]:
    """Yield (hidden states, weight, bias) for each `rows` rows."""
    head = (None, None) if scored.head is None else (scored.head.weight, scored.head.bias)
    return ((hidden, *head) for hidden in scored.hidden.split(rows))


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
