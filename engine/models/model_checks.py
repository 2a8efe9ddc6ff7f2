"""Probes of a model: test for a plain linear head, and for attention across packed documents.

Tests: tests/src/tasks/test_causal_lm.py.
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from engine.config.errors import UsageError, errors_of
from engine.models import varlen_attention
from engine.models.varlen_attention import document_bounds, takes_lengths
from engine.process.private_apis import attention_kernel, known_masks

LENGTH = 8  # of a probe's row, in tokens
# Largest influence of a packed row's first document on the second, relative to that in a row of one document. Measured on
# 24 kinds of models: exactly 0 where documents are separate, 2e-5 and more where one sees the other.
LEAK = 1e-9


@contextmanager
def probing(model: torch.nn.Module):
    """Within, the model runs on the CPU without gradients and dropout. Raise UsageError if it fails."""
    was_training = model.training
    kernel = attention_kernel(model.config)
    model.eval()
    if kernel and "flash" in kernel:  # flash attention runs on GPUs only
        model.set_attn_implementation("eager")
    try:
        # Sizes of its configuration may not fit each other, or it does not take position_ids.
        what = f"model_config or model_name_or_path: {type(model).__name__} does not run on a row of tokens"
        with torch.no_grad(), errors_of(what):
            yield
    finally:
        model.train(was_training)
        if kernel != attention_kernel(model.config):
            model.set_attn_implementation(kernel)


def has_plain_lm_head(model: Any, vocab_size: int) -> bool:
    """Return True if the logits are exactly the output embedding applied to the last hidden state."""
    if model.base_model is model:
        return False
    ids = torch.arange(LENGTH).remainder(vocab_size)[None]
    return is_plain_head(
        model,
        lambda: model(input_ids=ids, use_cache=False).logits,
        lambda: model.base_model(input_ids=ids, use_cache=False).last_hidden_state,
    )


def is_plain_head(model: Any, logits_of: Callable[[], Any], hidden_of: Callable[[], Any]) -> bool:
    """Return True if `logits_of()` is exactly the output embedding applied to `hidden_of()`.

    Some models scale or cap their logits. A loss computed from their hidden states would be silently wrong. Random
    weights give logits near zero, where a cap has no effect, so the probe replaces the logits with large values."""
    head = model.get_output_embeddings()
    seen = {}
    if not isinstance(head, torch.nn.Linear):
        return False

    def replace_logits(head, inputs, logits):
        seen["hidden"] = inputs[0]
        seen["logits"] = torch.linspace(-1e3, 1e3, logits.numel(), dtype=logits.dtype).view_as(logits)
        return seen["logits"]

    with probing(model):
        hook = head.register_forward_hook(replace_logits)
        logits = logits_of()
        hook.remove()
        hidden = hidden_of()
    if not seen or seen["hidden"].shape != hidden.shape:
        return False
    return torch.equal(logits.to(seen["logits"].dtype), seen["logits"]) and torch.allclose(seen["hidden"], hidden)


def check_packing_and_choose_kernel(model: Any, vocab_size: int, attention: str | None) -> bool:
    """Return whether packed rows are separated by the lengths of their documents, else by a mask.

    Without `attention`, the kernel that the run file asks for, the model gets the one by lengths where it is the default.
    Raise UsageError if documents would attend to each other."""
    kernel = attention_kernel(model.config)
    if attention is None and varlen_attention.is_default_for(model):
        try:
            check_packing(varlen_attention.use_in(model), vocab_size)
            return True
        except UsageError:
            model.set_attn_implementation(kernel)
    check_packing(model, vocab_size)
    return varlen_attention.takes_lengths(kernel)


def check_packing(model: Any, vocab_size: int) -> None:
    """Raise UsageError if the second document of a packed row sees the first, or is not as if alone in a row.

    Recurrent models, convolutions, ALiBi and models that make their own positions ignore position_ids without an error."""
    half = LENGTH // 2
    second = vocab_size - 1 - torch.arange(half) % vocab_size  # special tokens, as those of padding, are mostly first
    first = [torch.full((half,), token) for token in (0, vocab_size - 1)]
    rows = torch.stack([torch.cat([row, second]) for row in first])
    inputs = {"input_ids": rows, "position_ids": torch.arange(half).repeat(len(rows), 2), "use_cache": False}
    with probing(model):
        by_lengths = takes_lengths(attention_kernel(model.config))
        inputs |= document_bounds(torch.full((2 * len(rows),), half), LENGTH) if by_lengths else {}
        with known_masks(packed=not by_lengths):
            # The first documents change places: a kernel may round differently in another row, but not in the same one.
            one, other = (model(**inputs | {"input_ids": ids}).logits[:, half:] for ids in (rows, rows.flip(0)))
            leak = influence_of_first_half(model, inputs)
        with known_masks(packed=False):
            alone = model(input_ids=second[None], use_cache=False).logits[0]
            influence = influence_of_first_half(model, {"input_ids": rows, "use_cache": False})
    rounding = 1e-3 if alone.dtype in (torch.float32, torch.float64) else 0.1
    largest = alone.abs().max()
    is_separate = leak <= LEAK * influence and (one - other).abs().max() <= 1e-4 * largest  # False for NaN
    if not is_separate or (one - alone).abs().max() > rounding * largest:
        raise UsageError(
            f"packing is true, but {model.config.model_type} models ignore position_ids, so the documents of a row "
            "would see each other, or not begin at position 0: give --packing false"
        )


def influence_of_first_half(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Return how much the second half of each row depends on the first: the largest gradient at its embeddings.

    It is exactly 0 if no path leads there, however small the weights are. A difference of logits is no such measure: a
    convolution of a small random model moves them by 1e-4 of the largest, as rounding may do."""
    embedded: list[torch.Tensor] = []

    def keep(embedding, ids, output):
        if output.shape[:2] != inputs["input_ids"].shape:
            return output
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    hooks = [part.register_forward_hook(keep) for part in model.modules() if isinstance(part, torch.nn.Embedding)]
    try:
        with torch.enable_grad():
            logits = model(**inputs).logits[:, LENGTH // 2 :]
            signs = torch.where(torch.arange(logits.numel()) * 37 % 101 < 50, 1.0, -1.0)  # a plain sum could cancel
            total = (logits * signs.view_as(logits).to(logits)).sum()
            gradients = torch.autograd.grad(total, embedded, allow_unused=True) if embedded else ()
    finally:
        for hook in hooks:
            hook.remove()
    largest = [gradient[:, : LENGTH // 2].abs().max() for gradient in gradients if gradient is not None]
    return torch.stack(largest).max() if largest else torch.zeros(())
