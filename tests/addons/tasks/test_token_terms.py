"""Log-probabilities and divergences per token in chunks: equal to the plain formula in value and gradient, in the memory of one chunk."""

import pytest
import torch
import torch.nn.functional as F

from addons.tasks.distillation.token_terms import distillation_terms, token_log_probs
from src.models import chunked_cross_entropy
from src.models.chunked_cross_entropy import Scored
from tests.models.test_chunked_cross_entropy import memory

CHUNK = 16  # rows; the smallest chunk there is


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setitem(chunked_cross_entropy.CHUNK_ELEMENTS, "cpu", 1)


def make(rows: int, seed: int, features: int = 11, vocabulary: int = 37, dtype=torch.float64) -> Scored:
    torch.manual_seed(seed)
    head = torch.nn.Linear(features, vocabulary, dtype=dtype)
    return Scored(torch.randn(rows, features, dtype=dtype, requires_grad=True), head)


def without_head(scored: Scored) -> Scored:
    assert scored.head is not None
    return Scored(scored.head(scored.hidden), None)


def make_targets(rows: int) -> torch.Tensor:
    targets = torch.randint(0, 37, (rows,))
    targets[torch.rand(rows) < 0.3] = -100
    return targets


def gradients(value: torch.Tensor, scored: Scored) -> list[torch.Tensor]:
    assert scored.head is not None
    return [value.detach(), *torch.autograd.grad(value, [scored.hidden, scored.head.weight, scored.head.bias])]


def plain_log_probs(scored: Scored, targets: torch.Tensor) -> torch.Tensor:
    chosen = scored.head(scored.hidden).log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(targets == -100, 0.0, chosen)


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("rows", [1, CHUNK, CHUNK + 1, 50])
def test_log_probs_equal_the_plain_formula(rows, head):
    scored, targets = make(rows, 0), make_targets(rows)
    factors = torch.randn(rows, dtype=torch.float64)
    ours = token_log_probs(scored if head else without_head(scored), targets)
    plain = plain_log_probs(scored, targets)
    for one, other in zip(gradients(ours @ factors, scored), gradients(plain @ factors, scored), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    assert torch.allclose(ours, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("heads", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("rows", [5, CHUNK, 50])
def test_distillation_equals_the_plain_formula(rows, heads):
    student, teacher, targets = make(rows, 0), make(rows, 1, features=23), make_targets(rows)
    one, other = (s if head else without_head(s) for s, head in zip((student, teacher), heads, strict=True))
    kl, cross_entropy, correct = distillation_terms(one, other, targets, 3.0)
    with torch.no_grad():
        p = (teacher.head(teacher.hidden) / 3).softmax(-1)
    logits = student.head(student.hidden)
    kept = (targets != -100).double()
    plain_kl = (p * (p.log() - (logits / 3).softmax(-1).log())).sum(-1) * kept
    plain = 0.3 * plain_kl.sum() + F.cross_entropy(logits, targets, reduction="sum")
    for a, b in zip(gradients(0.3 * kl.sum() + cross_entropy.sum(), student), gradients(plain, student), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
    assert torch.allclose(kl, plain_kl, rtol=0, atol=1e-12)
    assert correct.tolist() == (logits.argmax(-1) == targets).tolist()


@pytest.mark.parametrize("chunked", [True, False])
def test_full_logits_never_exist(monkeypatch, chunked):
    """The mutant computes all rows in one chunk."""
    monkeypatch.setitem(chunked_cross_entropy.CHUNK_ELEMENTS, "cpu", 1 if chunked else 1 << 30)
    student, teacher = (make(512, seed, vocabulary=4096, dtype=torch.float32) for seed in (0, 1))
    targets = torch.randint(0, 4096, (512,))

    def run():
        kl, cross_entropy, _ = distillation_terms(student, teacher, targets, 2.0)
        (kl.sum() + cross_entropy.sum()).backward()

    largest, _ = memory(run)
    assert (largest < 512 * 4096 * 4) == chunked
