"""Cross-entropy of a linear head in chunks, so that full logits never exist.

Tests: tests/models/test_losses.py.
"""

import torch
import torch.nn.functional as F
import torch.utils.checkpoint

CHUNK_ELEMENTS = {"cpu": 1 << 22}  # logits alive at once: what a CPU's caches like, and 128 MiB of float32 elsewhere


def chunk_rows(weight: torch.Tensor) -> int:
    """Return how many rows of logits are computed at a time for a head of shape (vocabulary, features)."""
    return max(16, CHUNK_ELEMENTS.get(weight.device.type, 1 << 25) // weight.shape[0])


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Return the summed cross-entropy of `hidden @ weight.T + bias` against `targets`, -100 ignored.

    hidden (rows, features), weight (vocabulary, features), targets (rows,); the sum is float32 or better. Memory
    beyond the inputs and their gradients is one chunk of logits, whatever the number of rows.
    """
    rows = chunk_rows(weight)
    if hidden.shape[0] <= rows:
        return _chunk(hidden, weight, bias, targets)
    low = hidden.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(hidden.device.type)
    if hasattr(F, "linear_cross_entropy") and not low:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        return F.linear_cross_entropy(
            hidden, weight, targets, linear_bias=bias, reduction="sum", ignore_index=-100, options=options
        )
    # torch's chunked form does not autocast and returns its sum in the dtype of `hidden`: 8 bits are no loss. Ours
    # computes a chunk's logits again in backward, one more matrix product.
    total = 0.0
    for h, t in zip(hidden.split(rows), targets.split(rows), strict=True):
        total = total + torch.utils.checkpoint.checkpoint(
            _chunk, h, weight, bias, t, use_reentrant=False, preserve_rng_state=False
        )
    return total


def _chunk(hidden, weight, bias, targets):
    logits = F.linear(hidden, weight, bias)
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return F.cross_entropy(logits, targets, reduction="sum")


@torch.no_grad()
def linear_scores(hidden, weight, bias, targets) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (summed cross-entropy, count of targets that have the largest logit), both float64, in bounded memory."""
    loss = correct = torch.zeros((), dtype=torch.float64, device=hidden.device)
    rows = chunk_rows(weight)
    for h, t in zip(hidden.split(rows), targets.split(rows), strict=True):
        more, right = scores(F.linear(h, weight, bias), t)
        loss, correct = loss + more, correct + right
    return loss, correct


def scores(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (summed cross-entropy, count of right targets) of logits (rows, classes), both float64, -100 ignored."""
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    loss = F.cross_entropy(logits, targets, reduction="none")
    return loss.double().sum(), (logits.argmax(-1) == targets).double().sum()
