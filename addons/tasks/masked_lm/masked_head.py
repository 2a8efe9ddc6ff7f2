"""A prediction head at chosen positions only, so that a masked language model computes few logits.

Tests: tests/addons/tasks/test_masked_lm.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from src.models.model_checks import probing


@contextmanager
def hidden_states_at(model: Any, positions: torch.Tensor) -> Iterator[None]:
    """Within, the head of `model` sees only the hidden states at `positions` of the flattened batch, as one row."""

    def select(module, inputs, output):
        output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[positions][None]
        return output

    hook = model.base_model.register_forward_hook(select)
    try:
        yield
    finally:
        hook.remove()


def has_positionwise_head(model: Any, vocab_size: int) -> bool:
    """Return True if logits depend only on the hidden state of their position, so that the head can skip others."""
    if model.base_model is model:
        return False
    ids = torch.arange(8).remainder(vocab_size).view(2, 4)
    positions = torch.tensor([1, 6])
    with probing(model):
        try:
            with hidden_states_at(model, positions):
                some = model(input_ids=ids).logits
        except (AttributeError, RuntimeError, ValueError):  # the base model returns no such output
            return False
        expected = model(input_ids=ids).logits.flatten(0, 1)[positions][None]
    return some.shape == expected.shape and torch.allclose(some, expected, atol=1e-5)
