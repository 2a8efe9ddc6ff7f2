"""Sums of the cross-entropy of a batch, and of its rows. A linear head's logits are made in chunks that fit.

Tests: tests/src/losses/test_chunked_cross_entropy.py and tests/addons/techniques/test_hard_examples.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.autograd.function import once_differentiable

from engine.models.compile_and_recompute import CompiledOnAccelerators
from engine.models.packed_attention import call_on_tokens
from engine.text.tokenize_and_pack import IGNORED
from src.losses.cross_entropy import PLAIN, CrossEntropy, at_least_float32

# Number of logits that exist at once where the loss is not compiled, so that several copies of them are in memory. A
# CPU is fastest if they fit its cache; other devices get 128 MiB of float32.
CHUNK_ELEMENTS = {"cpu": 1 << 22}
DEVICE_CHUNK_ELEMENTS = 1 << 25
# Each chunk reads the whole head, and writes its gradient if it is trained. With a vocabulary of 50,304 and 768
# features, chunks of 128 rows take 1.2 times as long as chunks of 512, with a frozen head 1.3 times.
MIN_ROWS_BY_FORMULA = 512
# A compiled loss keeps one copy of its logits, in the dtype of the head. Up to this share of an accelerator's memory,
# all logits of a micro-batch are computed at once; larger ones in chunks of the second share. On an H200, chunks of 2 GB
# take 4 % longer, of 0.5 GB up to 31 % (docs/performance.md).
WHOLE_SHARE, CHUNK_SHARE = 1 / 8, 1 / 32


class Scored(NamedTuple):
    """What a model computes for the targets of a micro-batch: hidden states (targets, features) and the head on them.

    Without a head, the hidden states are the logits."""

    hidden: torch.Tensor
    head: torch.nn.Linear | None = None
    router_logits: tuple[torch.Tensor, ...] = ()  # of each layer of a mixture of experts, if asked for


def score_tokens(model: torch.nn.Module, inputs: dict[str, torch.Tensor], plain_head: bool, **options) -> Scored:
    """Run a language model on `input_ids`, and on `position_ids` and `documents` of packed rows.

    The head runs only if it is not linear."""
    # With a KV cache, even an empty one, transformers silently stops recognizing packed documents.
    arguments = {"input_ids": inputs["input_ids"], "position_ids": inputs.get("position_ids"), "use_cache": False}
    output = call_on_tokens(model, arguments | options, inputs.get("documents"), headless=plain_head)
    hidden, head = (output.last_hidden_state, model.get_output_embeddings()) if plain_head else (output.logits, None)
    return Scored(hidden.flatten(0, 1), head, getattr(output, "router_logits", None) or ())


def positions_of_targets(targets: np.ndarray) -> dict[str, np.ndarray]:
    """Return {"target_positions": positions of the targets other than -100 in the flattened array} for `sums_from_scored`.

    The head then computes no logits of padding and prompts. Empty if that would save less than a twentieth."""
    positions = np.flatnonzero(targets != IGNORED)
    return {"target_positions": positions} if len(positions) <= 0.95 * targets.size else {}


def chunk_rows(device_type: str, vocabulary: int) -> int:
    """Return the number of rows of logits to compute at a time without compilation."""
    return max(16, CHUNK_ELEMENTS.get(device_type, DEVICE_CHUNK_ELEMENTS) // vocabulary)


def fitting_rows(rows: int, bytes_per_row: int, memory: int) -> int:
    """Return how many of `rows` rows of logits a compiled loss computes at a time, on a device with `memory` bytes."""
    if rows * bytes_per_row <= WHOLE_SHARE * memory:
        return rows
    return max(16, int(CHUNK_SHARE * memory) // bytes_per_row)


def sums_from_logits(
    logits: torch.Tensor, targets: torch.Tensor, training: bool, options: CrossEntropy = PLAIN
) -> dict[str, torch.Tensor]:
    """Return sums over logits (rows, classes): `loss`, and in evaluation `correct`. Targets of -100 are ignored.

    In training, the loss is that of `options`, with its further sums unless it is the plain cross-entropy. In
    evaluation, both are float64."""
    logits = at_least_float32(logits)
    if training and not options.is_plain_loss:
        return options.sums(logits, targets)
    if training:
        return {"loss": F.cross_entropy(logits, targets, reduction="sum")}
    loss = F.cross_entropy(logits, targets, reduction="none")
    return {"loss": loss.double().sum(), "correct": (logits.argmax(-1) == targets).double().sum()}


def sums_from_scored(
    scored: Scored,
    targets: torch.Tensor,
    training: bool,
    options: CrossEntropy = PLAIN,
    positions: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return the sums of `sums_from_logits` for what a model has computed for the targets (rows,), all or those at
    `positions` (of `positions_of_targets`).

    A linear head takes three matrix products in all and bounded memory; its sums are float32 or better."""
    hidden, head = scored.hidden, scored.head
    if positions is not None:
        hidden, targets = hidden.index_select(0, positions), targets[positions]
    if head is None:
        return sums_from_logits(hidden, targets, training, options)
    weight, device = head.weight, head.weight.device
    arguments = (hidden, targets, weight, head.bias, options, training)
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight.dtype
    rows = chunk_rows(device.type, weight.shape[0])
    if _sums_of_rows.compiles(*arguments):
        memory = torch.get_device_module(device).get_device_properties(device).total_memory
        rows = fitting_rows(hidden.shape[0], weight.shape[0] * dtype.itemsize, memory)
    if hidden.shape[0] <= rows:
        return _sums_of_rows(*arguments)
    if dtype is not torch.float16:
        return _sums_by_chunk(rows, *arguments)
    # In float16, each gradient needs the loss scale, which is known in backward only.
    parts = zip(hidden.split(rows), targets.split(rows), strict=True)
    return _added([recomputed(_sums_of_rows, *part, *arguments[2:]) for part in parts])


@CompiledOnAccelerators
def _sums_of_rows(hidden, targets, weight, bias, options: CrossEntropy, training: bool) -> dict[str, torch.Tensor]:
    return sums_from_logits(F.linear(hidden, weight, bias), targets, training, options)


def _sums_by_chunk(rows: int, hidden, targets, weight, bias, options, training: bool) -> dict[str, torch.Tensor]:
    """Return the sums of `rows` rows at a time. Each chunk computes its gradient at once, so no logits are kept for
    backward, and none are computed twice."""
    inputs = (hidden, weight, bias)
    trained = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]
    leaves = [x if x is None else torch.nn.Parameter(x.detach(), on) for x, on in zip(inputs, trained, strict=True)]
    # In 16 bits, the sum over chunks would lose what each of them adds to the gradient of the head.
    dtypes = (hidden.dtype, *[torch.promote_types(weight.dtype, torch.float32)] * 2)
    gradients = [torch.zeros_like(x, dtype=d) if on else None for x, d, on in zip(inputs, dtypes, trained, strict=True)]
    memory = None
    if training and any(trained) and options.is_plain_loss and hidden.device.type == "cpu":
        rows = max(rows, MIN_ROWS_BY_FORMULA)
        memory = torch.empty(min(rows, hidden.shape[0]), weight.shape[0], dtype=dtypes[1])
    parts = []
    for start in range(0, hidden.shape[0], rows):
        part = slice(start, start + rows)
        leaves[0] = hidden.detach()[part].requires_grad_(trained[0])
        sinks = [g if i or g is None else g[part] for i, g in enumerate(gradients)]
        if memory is None:
            parts.append(_add_gradients(sinks, leaves, targets[part], options, training))
        else:
            parts.append(_add_gradients_by_formula(sinks, leaves, targets[part], memory))
    total = _added(parts)
    if any(trained):
        total["loss"] = _LossWithGradients.apply(total["loss"], gradients, *inputs)
    return total


def _add_gradients(sinks: list, inputs: list, targets: torch.Tensor, *rest) -> dict[str, torch.Tensor]:
    """Return the sums of a chunk; add the gradients by (hidden states, weight, bias) to `sinks` that are not None."""
    sums = _sums_of_rows(inputs[0], targets, *inputs[1:], *rest)
    trained = [(sink, x) for sink, x in zip(sinks, inputs, strict=True) if sink is not None]
    if trained:
        gradients = torch.autograd.grad(sums["loss"], [x for _, x in trained])
        for (sink, _), gradient in zip(trained, gradients, strict=True):
            sink += gradient
    return {name: value.detach() for name, value in sums.items()}


@torch.no_grad()
def _add_gradients_by_formula(sinks: list, inputs: list, targets: torch.Tensor, memory) -> dict[str, torch.Tensor]:
    """Return the plain training loss of a chunk, and add its gradients to `sinks`, as `_add_gradients` does.

    Logits, probabilities, and the gradient by the logits (probabilities, less 1 at the target) take turns in `memory`.
    On a CPU, new memory for each of them and each chunk makes the whole loss 1.3 times as slow."""
    hidden, weight, bias = inputs
    logits = memory[: len(targets)]
    dtype = _write_logits(logits, hidden, weight, bias)
    ignored = targets == IGNORED
    index = targets.masked_fill(ignored, 0)[:, None]
    logits -= logits.amax(-1, keepdim=True)
    of_targets = logits.gather(-1, index)
    denominators = logits.exp_().sum(-1, keepdim=True)
    loss = (denominators.log() - of_targets)[:, 0].masked_fill(ignored, 0).sum()
    by_logits = logits.div_(denominators).scatter_add_(-1, index, torch.full_like(of_targets, -1))
    by_logits = by_logits.index_fill_(0, ignored.nonzero()[:, 0], 0).to(dtype)
    for sink, left, right in ((sinks[0], by_logits, weight), (sinks[1], by_logits.T, hidden)):
        if sink is not None and sink.dtype == left.dtype == right.dtype:
            torch.addmm(sink, left, right, out=sink)
        elif sink is not None:
            sink += left @ right
    if sinks[2] is not None:
        sinks[2] += by_logits.sum(0)
    return {"loss": loss}


def _write_logits(logits: torch.Tensor, hidden, weight, bias) -> torch.dtype:
    """Fill `logits`; return the dtype of the product, under autocast and with 16-bit weights not that of `logits`."""
    if torch.is_autocast_enabled("cpu") or weight.dtype != logits.dtype:
        product = F.linear(hidden, weight, bias)
        logits.copy_(product)
        return product.dtype
    torch.mm(hidden, weight.T, out=logits)
    if bias is not None:
        logits += bias
    return logits.dtype


def _added(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([part[name] for part in parts]).sum() for name in parts[0]}


class _LossWithGradients(torch.autograd.Function):
    """A loss with gradients by its inputs that are known already. Backward runs once: it scales them in place."""

    @staticmethod
    def forward(ctx, loss, gradients: list[torch.Tensor | None], *inputs):
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, scale):
        return None, None, *(gradient if gradient is None else gradient.mul_(scale) for gradient in ctx.saved_tensors)


def recomputed(function: Callable, *arguments):
    """Call the function; backward calls it again instead of keeping its logits."""
    return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def row_losses(scored: Scored, targets: torch.Tensor, options: CrossEntropy = PLAIN) -> dict[str, torch.Tensor]:
    """Return `loss` and `weight` of each row, (rows,), which add up to the training loss and the weight of the batch.

    targets (rows, …); targets of -100 are ignored. Backward computes the logits again, a chunk at a time."""
    weight, bias = (None, None) if scored.head is None else (scored.head.weight, scored.head.bias)

    def losses(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = hidden if weight is None else F.linear(hidden, weight, bias)
        return options.per_target(at_least_float32(logits), targets)["loss"]

    size = chunk_rows(scored.hidden.device.type, scored.hidden.shape[-1] if weight is None else weight.shape[0])
    chunks = zip(scored.hidden.split(size), targets.flatten().split(size), strict=True)
    loss = torch.cat([recomputed(losses, *chunk) for chunk in chunks]).view_as(targets)
    weights = (targets != IGNORED).long()
    if (class_weights := options.class_weights_on(weights.device)) is not None:
        weights = weights * class_weights[targets.clamp(min=0)]
    return {name: value.reshape(len(targets), -1).sum(1) for name, value in (("loss", loss), ("weight", weights))}
