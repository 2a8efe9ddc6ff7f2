"""Activation memory of a micro-batch: the bytes kept for backward, measured with fake tensors.

docs/scaling.md explains what is counted. Tests: tests/models/test_memory_estimate.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from src.models import losses
from src.models.compile_and_recompute import repeated_layers
from src.runtime import private_apis
from src.runtime.private_apis import known_masks

Loss = Callable[[torch.nn.Module, dict[str, torch.Tensor]], Any]


@dataclass(frozen=True, eq=False)
class Forward:
    """A forward pass to measure: `loss(model, inputs(number of rows))`."""

    model: torch.nn.Module
    loss: Loss
    inputs: Callable[[int], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Kept:
    """What a forward pass leaves for backward, for each row."""

    saved: float  # bytes, except the parameters themselves
    layer_input: float = 0  # bytes of the input of one repeated layer
    head_rows: float = 0  # rows of logits that are computed in chunks, and never exist at once
    vocabulary: int = 0  # their width


def activation_bytes(
    forward: Forward, rows: int, dtype: torch.dtype, autocast: bool, recomputed_layers: int = 0
) -> float | None:
    """Return the bytes that autograd keeps of a forward pass of `rows` rows, plus one chunk of logits.

    Return None if the loss does not run on tensors without values. A recomputed layer keeps only its input."""
    if (kept := kept_per_row(forward, dtype, autocast)) is None:
        return None
    per_row = kept.saved
    if recomputed_layers:  # plus one whole layer at a time
        per_row = recomputed_layers * kept.layer_input + per_row / recomputed_layers
    if not kept.vocabulary:
        return rows * per_row
    chunk = min(rows * kept.head_rows, losses.chunk_rows("meta", kept.vocabulary))
    return rows * per_row + chunk * kept.vocabulary * (dtype.itemsize + 3 * max(4, dtype.itemsize))  # softmax, gradient


@lru_cache(maxsize=2)  # calls for different strategies differ only in `autocast`
def kept_per_row(forward: Forward, dtype: torch.dtype, autocast: bool) -> Kept | None:
    """Return what one more row keeps for backward; None if the loss does not run on tensors without values."""
    batches = [forward.inputs(rows) for rows in (2, 3)]  # not one row, because BatchNorm may need two
    for training in (True, False):  # the second without dropout: some models drop whole layers by a random value
        try:
            two, three = (measure(forward, batch, dtype, autocast, training) for batch in batches)
        except Exception:  # the loss reads values (`.item()`), or an operation has no fake form
            continue
        # Saved copies of weights cancel out.
        return Kept(three.saved - two.saved, two.layer_input / 2, two.head_rows / 2, two.vocabulary)
    return None


def forward_of_row(model: torch.nn.Module, task: Any, row: dict) -> Forward:
    """Return the forward pass of a micro-batch made of copies of one prepared row."""
    loss = task.represent if task.has_batch_loss else task.loss
    return Forward(model, loss, lambda rows: task.collate([row] * rows, training=True).inputs)


# ---- models without rows: the memory command opens no data -----------------------------------------------------------


def forward_without_rows(model: torch.nn.Module, length: int) -> Forward:
    """Return a forward pass over invented inputs: images if the model reads images, else `length` token ids."""
    config: Any = getattr(model, "config", None)

    def inputs(rows: int) -> dict[str, torch.Tensor]:
        if getattr(model, "main_input_name", "") == "pixel_values":
            size = getattr(config, "image_size", 224)
            size = size if isinstance(size, list | tuple) else (size, size)
            return {"pixel_values": torch.zeros(rows, getattr(config, "num_channels", 3), *size)}
        ids = torch.zeros(rows, length, dtype=torch.long)
        names = ("input_ids", "decoder_input_ids") if getattr(config, "is_encoder_decoder", False) else ("input_ids",)
        return dict.fromkeys(names, ids)

    return Forward(model, _body_and_head, inputs)


def _body_and_head(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run the model without its head, and the head as a loss that computes logits in chunks."""
    body = getattr(model, "base_model", model)
    cache = {"use_cache": False} if "input_ids" in inputs else {}
    hidden = body(**inputs, **cache)[0]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        return hidden
    return losses.linear_cross_entropy(hidden.flatten(0, 1), head.weight, None, hidden.new_zeros(1))


# ---- one measured forward pass ---------------------------------------------------------------------------------------


class _FlashAttention(torch.autograd.Function):
    """Saves the same tensors for backward as flash attention: inputs, output, and one number per query."""

    @staticmethod
    def forward(ctx, q, k, v):
        *rows, heads, length, _ = q.shape
        out = q.new_empty(*rows, length, heads, v.shape[-1]).transpose(-3, -2)  # the layout of the layers around it
        ctx.save_for_backward(q, k, v, out, torch.empty(q.shape[:-1], dtype=torch.float32))
        return out


class _Experts(torch.autograd.Function):
    """Saves the same tensors for backward as the matrix products of all experts, which have no fake form in float32."""

    @staticmethod
    def forward(ctx, inputs, weights):
        ctx.save_for_backward(inputs, weights)
        return inputs.new_empty(*inputs.shape[:-1], weights.shape[-1])


class _ChunkedHead(torch.autograd.Function):
    """Saves the same tensor for backward as a loss that recomputes its logits in chunks."""

    @staticmethod
    def forward(ctx, hidden):
        ctx.save_for_backward(hidden)
        return hidden.new_zeros(())


class _Loss(torch.nn.Module):
    """A loss as the forward pass of a module, so that the parameters of its model can be replaced."""

    def __init__(self, forward: Forward):
        super().__init__()
        self.model, self.loss = forward.model, forward.loss

    def forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        return self.loss(self.model, inputs)


@contextmanager
def _replaced(chunks: list[tuple[int, int]]) -> Iterator[None]:
    """Within, functions save what their kernels on an accelerator save. `chunks` gets (rows, vocabulary) of heads."""

    def chunked(hidden, weight, bias, targets):
        chunks.append((hidden.shape[0], weight.shape[0]))
        return _ChunkedHead.apply(hidden)

    stand_ins: dict[tuple[Any, str], Callable] = {
        (F, "scaled_dot_product_attention"): lambda q, k, v, *_, **__: _FlashAttention.apply(q, k, v),
        (F, "grouped_mm"): lambda inputs, weights, *_, **__: _Experts.apply(inputs, weights),
        (losses, "linear_cross_entropy"): chunked,
        (losses, "linear_sums"): lambda *arguments: {"loss": chunked(*arguments[:4])},
    }
    with private_apis.replaced(stand_ins):
        yield


def measure(
    forward: Forward, inputs: dict[str, torch.Tensor], dtype: torch.dtype, autocast: bool, training: bool = True
) -> Kept:
    """Return what the loss of `inputs` keeps for backward, in sum, measured with fake tensors."""
    module, saved, chunks, layer_inputs = _Loss(forward), {}, [], []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # The tensor is kept, so that its address is not reused.
        saved[private_apis.storage_id(tensor)] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    def fake(value: torch.Tensor) -> torch.Tensor:
        cast = value.is_floating_point() and not autocast
        return torch.empty(value.shape, dtype=dtype if cast else value.dtype, requires_grad=value.requires_grad)

    def note(layer, arguments, named):
        layer_inputs.extend(value.nbytes for value in [*arguments, *named.values()][:1] if torch.is_tensor(value))

    modes = {part: part.training for part in module.modules()}
    hooks = [part.register_forward_pre_hook(note, with_kwargs=True) for part in repeated_layers(module.model)[:1]]
    module.train(training)
    try:
        with private_apis.fake_tensors(), _replaced(chunks):
            weights = {name: fake(value) for name, value in module.named_parameters()}
            weights |= {name: fake(value) for name, value in module.named_buffers()}
            own = {private_apis.storage_id(value) for value in weights.values()}
            batch = {name: fake(value) for name, value in inputs.items()}
            graph = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            with graph, known_masks(packed=False), torch.autocast("cpu", dtype, enabled=autocast):
                torch.func.functional_call(module, weights, (batch,))
            kept = sum(size for key, (size, _) in saved.items() if key not in own)
            return Kept(kept, *layer_inputs[:1] or (0,), *chunks[0] if chunks else (0, 0))
    finally:
        for hook in hooks:
            hook.remove()
        for part, training in modes.items():
            part.training = training
