"""Cross-entropy sums for training and evaluation. A linear head is computed in chunks, so full logits never exist.

Tests: tests/models/test_losses.py.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from src.models.cross_entropy import IGNORED, PLAIN, CrossEntropy

# Number of logits that exist at once. A CPU is fastest if they fit its cache; other devices get 128 MiB of float32.
CHUNK_ELEMENTS = {"cpu": 1 << 22}
DEVICE_CHUNK_ELEMENTS = 1 << 25


def chunk_rows(device_type: str, vocabulary: int) -> int:
    """Return the number of rows of logits to compute at a time."""
    return max(16, CHUNK_ELEMENTS.get(device_type, DEVICE_CHUNK_ELEMENTS) // vocabulary)


def sums_from_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    training: bool,
    options: CrossEntropy = PLAIN,
    class_weights: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return sums over logits (rows, classes): `loss`, and in evaluation `correct`. Targets of -100 are ignored.

    In training, the loss is that of `options`, with its further sums unless it is the plain cross-entropy."""
    if training and not options.is_plain_loss:
        return options.sums(at_least_float32(logits), targets, class_weights)
    if training:
        return {"loss": F.cross_entropy(at_least_float32(logits), targets, reduction="sum")}
    loss, correct = scores(logits, targets)
    return {"loss": loss, "correct": correct}


def mixed_sums(
    logits: torch.Tensor,
    labels: torch.Tensor,
    others: torch.Tensor,
    shares: torch.Tensor,
    options: CrossEntropy,
    class_weights: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return the training sums of rows that are a mixture (mixup): `shares` of `labels`, the rest of `others`."""
    logits = at_least_float32(logits)
    own, other = (options.per_target(logits, targets, class_weights) for targets in (labels, others))
    return {name: (shares * own[name] + (1 - shares) * other[name]).sum() for name in own}


def squared_error_sums(predictions: torch.Tensor, values: torch.Tensor, training: bool) -> dict[str, torch.Tensor]:
    """Return sums over predictions (rows,): `loss`, the squared error, and in evaluation `absolute_error` (float64)."""
    error = (at_least_float32(predictions) if training else predictions.double()) - values
    return {"loss": error.square().sum()} | ({} if training else {"absolute_error": error.abs().sum()})


def sums_from_hidden(
    hidden: torch.Tensor, head: torch.nn.Linear, targets: torch.Tensor, training: bool, options: CrossEntropy = PLAIN
) -> dict[str, torch.Tensor]:
    """Return the same sums for the logits `head(hidden)` in bounded memory. `hidden` is (rows, features)."""
    if training and not options.is_plain_loss:
        return linear_sums(hidden, head.weight, head.bias, targets, options)
    if training:
        return {"loss": linear_cross_entropy(hidden, head.weight, head.bias, targets)}
    loss, correct = linear_scores(hidden, head.weight, head.bias, targets)
    return {"loss": loss, "correct": correct}


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Return the summed cross-entropy of `hidden @ weight.T + bias`. Targets of -100 are ignored.

    hidden (rows, features), weight (vocabulary, features), targets (rows,); the sum is float32 or better. It
    needs memory for its inputs, their gradients, and one chunk of logits, for any number of rows.
    """
    rows = chunk_rows(weight.device.type, weight.shape[0])
    if hidden.shape[0] <= rows:
        return _chunk(hidden, weight, bias, targets)
    low = hidden.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(hidden.device.type)
    if hasattr(F, "linear_cross_entropy") and not low:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        return F.linear_cross_entropy(
            hidden, weight, targets, linear_bias=bias, reduction="sum", ignore_index=-100, options=options
        )
    # torch's chunked form ignores autocast and returns its sum in the dtype of `hidden`. bfloat16 has 8 bits, too few
    # for a loss. The loop below recomputes the logits of a chunk in backward, which costs one more matrix product.
    total = 0.0
    for h, t in zip(hidden.split(rows), targets.split(rows), strict=True):
        total = total + recomputed(_chunk, h, weight, bias, t)
    return total


def linear_sums(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, options: CrossEntropy
) -> dict[str, torch.Tensor]:
    """Return the training sums of `options` for the logits `hidden @ weight.T + bias`, in the same bounded memory."""
    rows = chunk_rows(weight.device.type, weight.shape[0])
    if hidden.shape[0] <= rows:
        return _sums_of_chunk(hidden, weight, bias, targets, options)
    total: dict[str, torch.Tensor] = {}
    for h, t in zip(hidden.split(rows), targets.split(rows), strict=True):
        for name, value in recomputed(_sums_of_chunk, h, weight, bias, t, options).items():
            total[name] = total[name] + value if name in total else value
    return total


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


def recomputed(function: Callable, *arguments):
    """Call the function; backward calls it again instead of keeping its logits."""
    return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def _chunk(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    return F.cross_entropy(at_least_float32(F.linear(hidden, weight, bias)), targets, reduction="sum")


def _losses_of_chunk(hidden, weight, bias, targets: torch.Tensor, options: CrossEntropy) -> torch.Tensor:
    return options.per_target(at_least_float32(F.linear(hidden, weight, bias)), targets)["loss"]


def _sums_of_chunk(hidden, weight, bias, targets: torch.Tensor, options: CrossEntropy) -> dict[str, torch.Tensor]:
    return options.sums(at_least_float32(F.linear(hidden, weight, bias)), targets)


@torch.no_grad()
def linear_scores(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (summed cross-entropy, number of correct predictions), both float64, in bounded memory."""
    loss = correct = torch.zeros((), dtype=torch.float64, device=hidden.device)
    rows = chunk_rows(weight.device.type, weight.shape[0])
    for h, t in zip(hidden.split(rows), targets.split(rows), strict=True):
        chunk_loss, chunk_correct = scores(F.linear(h, weight, bias), t)
        loss = loss + chunk_loss
        correct = correct + chunk_correct
    return loss, correct


def scores(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (summed cross-entropy, number of correct predictions) of logits (rows, classes), both float64."""
    logits = at_least_float32(logits)
    loss = F.cross_entropy(logits, targets, reduction="none")
    return loss.double().sum(), (logits.argmax(-1) == targets).double().sum()


def at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    """Return logits of 16 bits in float32, others unchanged."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
