"""Sums of the cross-entropy of a batch, and of its rows. A linear head's logits are made in chunks that fit.

Tests: tests/src/losses/test_chunked_cross_entropy.py and tests/addons/techniques/test_hard_examples.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.autograd.function import once_differentiable

from engine.models.compile_and_recompute import CompiledOnAccelerators
from engine.models.packed_attention import call_on_tokens
from engine.rows.tokenize_and_pack import IGNORED
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
WHOLE_SHARE = 1 / 8
CHUNK_SHARE = 1 / 32


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
    router_logits = getattr(output, "router_logits", None) or ()
    if not plain_head:
        return Scored(output.logits.flatten(0, 1), None, router_logits)
    return Scored(output.last_hidden_state.flatten(0, 1), model.get_output_embeddings(), router_logits)


def positions_of_targets(targets: np.ndarray) -> dict[str, np.ndarray]:
    """Return {"target_positions": positions of the targets other than -100 in the flattened array} for `sums_from_scored`.

    The head then computes no logits of padding and prompts. Empty if that would save less than a twentieth."""
    positions = np.flatnonzero(targets != IGNORED)
    if len(positions) > 0.95 * targets.size:
        return {}
    return {"target_positions": positions}


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

    A linear head takes three matrix products in all and bounded memory; its sums are float32 or better. It has three
    ways to the same sums: all logits at once if they fit, else in chunks that compute their gradient at once, or in
    float16 in chunks whose logits backward computes again."""
    hidden = scored.hidden
    if positions is not None:
        hidden = hidden.index_select(0, positions)
        targets = targets[positions]
    if scored.head is None:
        return sums_from_logits(hidden, targets, training, options)
    weight = scored.head.weight
    arguments = (hidden, targets, weight, scored.head.bias, options, training)
    dtype = _dtype_of_logits(weight)
    rows = chunk_rows(weight.device.type, weight.shape[0])
    if _sums_of_rows.compiles(*arguments):
        rows = fitting_rows(hidden.shape[0], weight.shape[0] * dtype.itemsize, _memory_of(weight.device))
    if hidden.shape[0] <= rows:
        return _sums_of_rows(*arguments)
    if dtype is torch.float16:  # a gradient needs the loss scale, which only backward knows
        return _sums_by_recomputed_chunk(rows, *arguments)
    return _sums_by_chunk(rows, *arguments)


def _dtype_of_logits(weight: torch.Tensor) -> torch.dtype:
    """Return the dtype of a product with `weight`, which autocast may lower."""
    device_type = weight.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype


def _memory_of(device: torch.device) -> int:
    """Return the bytes of an accelerator's memory."""
    return torch.get_device_module(device).get_device_properties(device).total_memory


# ---- a linear head: all logits at once -------------------------------------------------------------------------------


@CompiledOnAccelerators
def _sums_of_rows(hidden, targets, weight, bias, options: CrossEntropy, training: bool) -> dict[str, torch.Tensor]:
    return sums_from_logits(F.linear(hidden, weight, bias), targets, training, options)


# ---- in chunks that backward computes again --------------------------------------------------------------------------


def _sums_by_recomputed_chunk(rows: int, hidden, targets, *others) -> dict[str, torch.Tensor]:
    """Return the sums of `rows` rows at a time; backward computes the logits of each chunk again."""
    chunks = zip(hidden.split(rows), targets.split(rows), strict=True)
    return _add_up([recomputed(_sums_of_rows, *chunk, *others) for chunk in chunks])


def recomputed(function: Callable, *arguments):
    """Call the function; backward calls it again instead of keeping its logits."""
    return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def _add_up(chunks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the sums of all chunks."""
    total = {}
    for name in chunks[0]:
        of_chunks = [sums[name] for sums in chunks]
        total[name] = torch.stack(of_chunks).sum()
    return total


# ---- in chunks that compute their gradient at once -------------------------------------------------------------------


class Operands(NamedTuple):
    """Hidden states (rows, features), weight and bias of a linear head; or their gradients, None for what is not trained."""

    hidden: Any
    weight: Any
    bias: Any

    def of_rows(self, rows: slice) -> "Operands":
        """Return the same with some of the rows of `hidden`."""
        return self if self.hidden is None else self._replace(hidden=self.hidden[rows])


def _sums_by_chunk(rows: int, hidden, targets, weight, bias, options, training: bool) -> dict[str, torch.Tensor]:
    """Return the sums of `rows` rows at a time. Each chunk computes its gradient at once, so no logits are kept for
    backward, and none are computed twice."""
    # In 16 bits, the sum over chunks would lose what each of them adds to the gradient of the head.
    dtype = torch.promote_types(weight.dtype, torch.float32)
    gradients = Operands(
        _zero_gradient(hidden, hidden.dtype),
        _zero_gradient(weight, dtype),
        _zero_gradient(bias, dtype),
    )
    has_gradient = any(gradient is not None for gradient in gradients)
    inputs = Operands(hidden.detach(), _detached_parameter(weight), _detached_parameter(bias))
    buffer = None  # of the logits, if the gradient is computed by its formula
    if training and has_gradient and options.is_plain_loss and hidden.device.type == "cpu":
        rows = max(rows, MIN_ROWS_BY_FORMULA)
        buffer_rows = min(rows, hidden.shape[0])
        buffer = torch.empty(buffer_rows, weight.shape[0], dtype=dtype)
    chunks = []
    for start in range(0, hidden.shape[0], rows):
        chunk = slice(start, start + rows)
        arguments = (gradients.of_rows(chunk), inputs.of_rows(chunk), targets[chunk])
        if buffer is None:
            chunks.append(_add_gradients(*arguments, options, training))
        else:
            chunks.append(_add_gradients_by_formula(*arguments, buffer))
    total = _add_up(chunks)
    if has_gradient:
        total["loss"] = _LossWithGradients.apply(total["loss"], gradients, hidden, weight, bias)
    return total


def _is_trained(tensor: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and tensor is not None and tensor.requires_grad


def _zero_gradient(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return zeros to add the gradients of chunks to, or None if the tensor is not trained."""
    return torch.zeros_like(tensor, dtype=dtype) if _is_trained(tensor) else None


def _detached_parameter(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the same values as a parameter of their own, so that the gradient of a chunk ends there."""
    return None if tensor is None else torch.nn.Parameter(tensor.detach(), _is_trained(tensor))


def _add_gradients(
    gradients: Operands, inputs: Operands, targets: torch.Tensor, options: CrossEntropy, training: bool
) -> dict[str, torch.Tensor]:
    """Return the sums of a chunk, and add its gradients by autograd."""
    hidden = inputs.hidden.requires_grad_(gradients.hidden is not None)
    sums = _sums_of_rows(hidden, targets, inputs.weight, inputs.bias, options, training)
    trained = [(total, tensor) for total, tensor in zip(gradients, inputs, strict=True) if total is not None]
    if trained:
        of_chunk = torch.autograd.grad(sums["loss"], [tensor for _, tensor in trained])
        for (total, _), gradient in zip(trained, of_chunk, strict=True):
            total += gradient
    return {name: value.detach() for name, value in sums.items()}


@torch.no_grad()
def _add_gradients_by_formula(
    gradients: Operands, inputs: Operands, targets: torch.Tensor, buffer: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the plain training loss of a chunk, and add its gradients by their formula.

    Logits, probabilities, and the gradient by the logits (probabilities, less 1 at the target) take turns in `buffer`.
    On a CPU, new memory for each of them and each chunk makes the whole loss 1.3 times as slow."""
    logits = buffer[: len(targets)]
    dtype = _write_logits(logits, *inputs)
    ignored = targets == IGNORED
    index = targets.masked_fill(ignored, 0)[:, None]
    logits -= logits.amax(-1, keepdim=True)
    target_logits = logits.gather(-1, index)
    denominators = logits.exp_().sum(-1, keepdim=True)
    losses = (denominators.log() - target_logits)[:, 0].masked_fill(ignored, 0)

    probabilities = logits.div_(denominators)
    minus_one = torch.full_like(target_logits, -1)
    by_logits = probabilities.scatter_add_(-1, index, minus_one)
    by_logits = by_logits.index_fill_(0, ignored.nonzero()[:, 0], 0).to(dtype)
    _add_product(gradients.hidden, by_logits, inputs.weight)
    _add_product(gradients.weight, by_logits.T, inputs.hidden)
    if gradients.bias is not None:
        gradients.bias.add_(by_logits.sum(0))
    return {"loss": losses.sum()}


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


def _add_product(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a matrix product to a gradient that is trained, in place where the dtypes allow it."""
    if total is None:
        return
    if total.dtype == left.dtype == right.dtype:
        torch.addmm(total, left, right, out=total)
    else:
        total += left @ right


class _LossWithGradients(torch.autograd.Function):
    """A loss with gradients by its inputs that are known already. Backward runs once: it scales them in place."""

    @staticmethod
    def forward(ctx, loss, gradients: Operands, *inputs):
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, scale):
        scaled = [None if gradient is None else gradient.mul_(scale) for gradient in ctx.saved_tensors]
        return None, None, *scaled


# ---- losses of rows --------------------------------------------------------------------------------------------------


def row_losses(scored: Scored, targets: torch.Tensor, options: CrossEntropy = PLAIN) -> dict[str, torch.Tensor]:
    """Return `loss` and `weight` of each row, (rows,), which add up to the training loss and the weight of the batch.

    targets (rows, …); targets of -100 are ignored. Backward computes the logits again, a chunk at a time."""
    losses = _target_losses(scored, targets.flatten(), options).view_as(targets)
    weights = (targets != IGNORED).long()
    class_weights = options.class_weights_on(weights.device)
    if class_weights is not None:
        weights = weights * class_weights[targets.clamp(min=0)]
    num_rows = len(targets)
    return {"loss": losses.reshape(num_rows, -1).sum(1), "weight": weights.reshape(num_rows, -1).sum(1)}


def _target_losses(scored: Scored, targets: torch.Tensor, options: CrossEntropy) -> torch.Tensor:
    """Return the training loss of each target (targets,); backward computes the logits again, a chunk at a time."""
    weight = None if scored.head is None else scored.head.weight
    bias = None if scored.head is None else scored.head.bias
    num_classes = scored.hidden.shape[-1] if weight is None else weight.shape[0]

    def losses_of_chunk(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = hidden if weight is None else F.linear(hidden, weight, bias)
        return options.per_target(at_least_float32(logits), targets)["loss"]

    rows = chunk_rows(scored.hidden.device.type, num_classes)
    chunks = zip(scored.hidden.split(rows), targets.split(rows), strict=True)
    return torch.cat([recomputed(losses_of_chunk, *chunk) for chunk in chunks])
