"""Attention of packed rows by the lengths of their documents, so that no mask is made: `attn_implementation: varlen`.

The default on NVIDIA GPUs in 16 bits, for every model that can have it.

Tests: tests/src/tasks/test_causal_lm.py; on a GPU tests/gpu/test_gpu.py.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.config.errors import UsageError
from engine.process.private_apis import attention_kernel, mark_dynamic

NAME = "varlen"
# From torch 2.15 on, causal attention by lengths is computed by cuDNN on Hopper and Blackwell, unless only torch's flash
# kernel is allowed. That would change numbers; and cuDNN makes a plan for each new shape, here each number of documents.
CHOOSES_KERNEL = torch.__version__ >= (2, 15)


def takes_lengths(kernel: str | None) -> bool:
    """Return True if an attention kernel separates documents by `document_bounds`, not by a mask.

    transformers reads the documents of flash attention from position_ids only in micro-batches of one row."""
    return bool(kernel) and (kernel == NAME or "flash" in kernel)


def is_default_for(model: Any) -> bool:
    """Return whether this process computes on a GPU with torch's flash kernel, in 16 bits, and the model can have it.

    The model was built with transformers' own choice, which is not sdpa if it caps scores or has sinks."""
    from accelerate.state import AcceleratorState, is_initialized

    if not is_initialized() or torch.version.cuda is None:
        return False
    state = AcceleratorState()
    mesh = state.parallelism_config
    in_16_bits = state.mixed_precision in ("bf16", "fp16") or model.dtype.itemsize == 2
    if state.device.type != "cuda" or not in_16_bits or (mesh and mesh.tp_size > 1):
        return False
    return torch.cuda.get_device_capability(state.device) >= (8, 0) and fits_flash_kernel(model)


def fits_flash_kernel(model: Any) -> bool:
    """Return whether the flash kernel takes the sizes of the model's heads, and attention has no dropout."""
    config = model.config.get_text_config()
    drops = any(value for name, value in config.to_dict().items() if "att" in name and "drop" in name)
    # Layers may have heads of different sizes, for which a configuration has no one number.
    sizes = {getattr(module, "head_dim", None) for module in model.modules()}
    sizes = {size for size in sizes if isinstance(size, int)}
    if not sizes:
        heads = getattr(config, "num_attention_heads", 0) or 0
        sizes = {getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)}
    takes_heads = all(0 < size <= 256 and size % 8 == 0 for size in sizes)
    return attention_kernel(model.config) == "sdpa" and not drops and takes_heads


def document_bounds(lengths: torch.Tensor, width: int) -> dict:
    """Return the arguments of a model for lengths of documents, row after row (documents,); each row adds to `width`.

    All rows count as one, as flash kernels take them, so its documents are those of all rows. Their longest length is
    bounded by the width, which the host knows."""
    bounds = F.pad(lengths.cumsum(0), (1, 0)).int()
    mark_dynamic(bounds)  # compiled layers take any number of documents
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": width, "max_length_k": width}


def use_in(model: Any) -> Any:
    """Return the model, built with sdpa, with this attention; rows that are not packed have sdpa's masks.

    transformers lets every model have a kernel that it does not know, and refuses sdpa where it would be wrong. Raise
    UsageError for a model with an attention of its own."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])
    model.set_attn_implementation(NAME)
    if attention_kernel(model.config) != NAME:
        raise UsageError(f"attn_implementation varlen: {type(model).__name__} has an attention of its own: give sdpa")
    return model


def varlen_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, **more):
    """Return the causal attention within documents (rows, length, heads, size), and None as there are no probabilities.

    query, key, value (rows, heads, length, size). Without documents it is sdpa."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    bounds = more.get("cu_seq_lens_q")
    if bounds is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
    unsupported = [name for name in ("softcap", "s_aux", "position_bias") if more.get(name) is not None]
    if dropout:
        unsupported.append("dropout")
    if value.shape[-1] != key.shape[-1]:
        unsupported.append("values of another size than the keys")
    if attention_mask is not None and sliding_window is None:
        unsupported.append("a mask")
    if unsupported:
        raise UsageError(
            f"attn_implementation varlen has no {unsupported[0]} in packed rows: give --attn_implementation sdpa"
        )
    rows, _, length, _ = query.shape
    # Norms in float32 may leave them in float32 under autocast, which does not know the kernel.
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    query, key, value = (x.to(dtype).transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    attend = _on_gpu if query.is_cuda else _document_by_document
    out = attend(query, key, value, bounds, length, scaling, sliding_window)
    return out.view(rows, length, *out.shape[1:]), None


def _on_gpu(query, key, value, bounds, length, scaling, window) -> torch.Tensor:
    """Return attention (tokens, heads, size) by torch's flash kernel, which takes 16-bit floats."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 takes fewer key heads without being asked.
    must_ask = query.shape[1] != key.shape[1] and "enable_gqa" in varlen_attn.__kwdefaults__
    options = {"enable_gqa": True} if must_ask else {}
    left = -1 if window is None else window - 1
    sizes = (bounds, bounds, length, length)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if CHOOSES_KERNEL else nullcontext():
        return varlen_attn(query, key, value, *sizes, scale=scaling, window_size=(left, 0), **options)


@torch.compiler.disable  # lengths are read from the tensor
def _document_by_document(query, key, value, bounds, _length, scaling, window) -> torch.Tensor:
    parts = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        mask = None
        if window is not None and window < end - start:
            mask = torch.ones(end - start, end - start, dtype=torch.bool).tril().triu(1 - window)
        part = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=True)
        parts.append(part.transpose(0, 1))
    return torch.cat(parts)
