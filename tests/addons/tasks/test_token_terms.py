"""Log-probabilities and divergences per token in the memory of one chunk; their tasks compare them with full logits."""

import pytest
import torch

from addons.tasks.distillation.token_terms import distillation_terms
from src.losses import chunked_cross_entropy
from src.losses.chunked_cross_entropy import Scored
from tests.helpers.losses import allocations


@pytest.mark.parametrize("chunked", [True, False])
def test_full_logits_never_exist(monkeypatch, chunked):
    """The mutant computes all rows in one chunk."""
    monkeypatch.setitem(chunked_cross_entropy.CHUNK_ELEMENTS, "cpu", 1 if chunked else 1 << 30)
    torch.manual_seed(0)
    student, teacher = (Scored(torch.randn(512, 11, requires_grad=True), torch.nn.Linear(11, 4096)) for _ in range(2))
    targets = torch.randint(0, 4096, (512,))

    def run():
        kl, cross_entropy, _ = distillation_terms(student, teacher, targets, 2.0)
        (kl.sum() + cross_entropy.sum()).backward()

    largest = max(allocations(run))
    assert (largest < 512 * 4096 * 4) == chunked
