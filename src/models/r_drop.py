"""R-Drop: a batch runs twice with two dropout masks, and its predictions are drawn together (Liang et al. 2021).

Tests: tests/models/test_r_drop.py.
"""

import torch

from src.config.fields import option
from src.models.losses import at_least_float32


def r_drop_option() -> float:
    """Declare the option `r_drop_alpha` of a task."""
    return option(
        "R-Drop: run every row twice with different dropout; weight of the divergence of both predictions; 0: once",
        0.0,
        min=0,
        from_checkpoint=False,
    )


def twice(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the rows of a batch, and then the same rows again."""
    return {name: torch.cat([value, value]) for name, value in inputs.items()}


def r_drop_sums(sums: dict[str, torch.Tensor], logits: torch.Tensor, alpha: float) -> dict[str, torch.Tensor]:
    """Return the training sums of rows that ran `twice`, (2 × rows, classes): half of `sums`, and `alpha` × `r_drop`.

    `r_drop` is the sum over rows of (KL(p ‖ q) + KL(q ‖ p)) / 2, where p and q are the predictions of both passes."""
    one, other = at_least_float32(logits).log_softmax(-1).chunk(2)
    divergence = ((one.exp() - other.exp()) * (one - other)).sum() / 2
    halves = {name: value / 2 for name, value in sums.items()}
    return halves | {"loss": halves["loss"] + alpha * divergence, "r_drop": divergence.detach()}
