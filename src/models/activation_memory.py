"""Activation memory of a micro-batch: the bytes kept for backward, measured with fake tensors.

docs/scaling.md explains what is counted. Tests: tests/models/test_memory_estimate.py.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F

from src.models.losses import chunk_rows
from src.runtime import private_apis
from src.runtime.private_apis import known_masks


def activation_bytes(
    model: torch.nn.Module, rows: int, length: int, dtype: torch.dtype, autocast: bool, recomputed_layers: int = 0
) -> float | None:
    """Return the bytes that autograd keeps for `rows` rows of `length` tokens, plus one chunk of logits.

    Return None if the model does not run on token ids alone. A recomputed layer keeps only its input."""
    try:
        per_row, layer_input = _bytes_per_row(model, length, dtype, autocast)
    except Exception:  # the model may need other inputs
        return None
    if recomputed_layers:
        per_row = recomputed_layers * layer_input + per_row / recomputed_layers  # plus one whole layer at a time
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        return rows * per_row
    vocabulary = head.weight.shape[0]
    chunk = min(rows * length, chunk_rows("meta", vocabulary))
    return rows * per_row + chunk * vocabulary * (dtype.itemsize + 3 * max(4, dtype.itemsize))  # softmax, gradient


@lru_cache(maxsize=2)  # calls for different strategies differ only in `autocast`
def _bytes_per_row(model: torch.nn.Module, length: int, dtype: torch.dtype, autocast: bool) -> tuple[int, int]:
    """Return (bytes that one more row adds, bytes of a layer's input). Saved copies of weights cancel out."""
    one, layer_input = saved_bytes(model, 1, length, dtype, autocast)
    two, _ = saved_bytes(model, 2, length, dtype, autocast)
    return two - one, layer_input


class _FlashAttention(torch.autograd.Function):
    """Saves the same tensors for backward as flash attention: inputs, output, and one number per query."""

    @staticmethod
    def forward(ctx, q, k, v):
        rows, heads, length, _ = q.shape
        out = q.new_empty(rows, length, heads, v.shape[-1]).transpose(1, 2)  # the memory layout of the layers around it
        ctx.save_for_backward(q, k, v, out, torch.empty(q.shape[:-1], dtype=torch.float32))
        return out


def saved_bytes(model: torch.nn.Module, rows: int, length: int, dtype: torch.dtype, autocast: bool) -> tuple[int, int]:
    """Return (bytes that autograd saves in a forward pass, bytes of one layer's input), measured with fake tensors."""
    decoder = getattr(model, "base_model", model)
    saved = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[private_apis.storage_id(tensor)] = (
            tensor.untyped_storage().nbytes(),
            tensor,
        )  # keep the tensor, so that its address is not reused
        return tensor

    def fake(value: torch.Tensor) -> torch.Tensor:
        cast = value.is_floating_point() and not autocast
        return torch.empty(value.shape, dtype=dtype if cast else value.dtype, requires_grad=value.requires_grad)

    attention = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = lambda q, k, v, *_, **__: _FlashAttention.apply(q, k, v)
    try:
        with private_apis.fake_tensors():
            weights = {name: fake(value) for name, value in decoder.named_parameters()}
            weights |= {name: fake(value) for name, value in decoder.named_buffers()}
            own = {private_apis.storage_id(value) for value in weights.values()}
            inputs = {"input_ids": torch.zeros(rows, length, dtype=torch.long), "use_cache": False}
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            with hooks, known_masks(packed=False), torch.autocast("cpu", dtype, enabled=autocast):
                hidden = torch.func.functional_call(decoder, weights, kwargs=inputs)[0]
            return sum(size for key, (size, _) in saved.items() if key not in own), hidden.nbytes
    finally:
        F.scaled_dot_product_attention = attention
