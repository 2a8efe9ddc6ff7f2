"""Probes of a model: test for a plain linear head, and for attention across packed documents.

Tests: tests/tasks/test_causal_lm.py.
"""

from contextlib import contextmanager

import torch

from src.config.errors import UsageError
from src.runtime.private_apis import known_masks


@contextmanager
def _probing(model: torch.nn.Module):
    """Within, the model runs without gradients and dropout."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def has_plain_lm_head(model: torch.nn.Module) -> bool:
    """Return True if the logits are exactly the output embedding applied to the last hidden state.

    Some models scale or cap their logits. A loss computed from their hidden states would be silently wrong. Random
    weights give logits near zero, where a cap has no effect, so the probe replaces the logits with large values."""
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or model.base_model is model:
        return False
    seen = {}

    def replace_logits(head, inputs, logits):
        seen["hidden"] = inputs[0]
        seen["logits"] = torch.linspace(-1e3, 1e3, logits.numel(), dtype=logits.dtype).view_as(logits)
        return seen["logits"]

    length = min(8, getattr(model.config, "max_position_embeddings", 8))
    ids = torch.arange(length).remainder(model.config.vocab_size)[None]
    with _probing(model):
        hook = head.register_forward_hook(replace_logits)
        logits = model(input_ids=ids, use_cache=False).logits
        hook.remove()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    if not seen or seen["hidden"].shape != hidden.shape:
        return False
    return torch.equal(logits.to(seen["logits"].dtype), seen["logits"]) and torch.allclose(seen["hidden"], hidden)


def check_packing(model: torch.nn.Module) -> None:
    """Raise UsageError if the second document of a packed row attends to the first.

    Recurrent models, ALiBi models and models that make their own positions ignore position_ids without an error."""
    vocab_size = model.config.vocab_size
    half = min(4, getattr(model.config, "max_position_embeddings", 8) // 2)
    second = torch.arange(half) % vocab_size
    rows = torch.stack([torch.cat([torch.full((half,), token), second]) for token in (0, vocab_size - 1)])
    positions = torch.arange(half).repeat(len(rows), 2)
    with _probing(model), known_masks(packed=True):
        one, other = model(input_ids=rows, position_ids=positions, use_cache=False).logits[:, half:]
    if not torch.allclose(one, other, rtol=1e-5, atol=1e-6):
        raise UsageError(
            f"packing is true, but {model.config.model_type} models ignore position_ids, so the documents of a row "
            "would attend to each other: give --packing false"
        )
