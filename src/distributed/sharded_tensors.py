"""Tensors of which each process holds a part: test for them, gather them, name them.

Tests: tests/checkpointing/test_sharded.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from src.runtime.private_apis import CHECKPOINT_WRAPPER_PREFIX


class ShardedTensorRef(NamedTuple):
    """A tensor that DeepSpeed has sharded in a way that torch does not know."""

    nbytes: int  # of the full tensor
    gather: Callable[[], torch.Tensor]  # a collective that returns the full tensor


def is_partial(value: Any) -> bool:
    """Return whether this process may hold only a part of a value."""
    return isinstance(value, ShardedTensorRef | torch.distributed.tensor.DTensor)


def gather_full(value: Any) -> torch.Tensor:
    """Return the full tensor; for a sharded one a collective, during which every process holds all of it."""
    if isinstance(value, ShardedTensorRef):
        return value.gather()
    return value.detach().full_tensor() if is_partial(value) else value


def plain_name(name: str) -> str:
    """Return the name of a parameter without the prefix that activation checkpointing inserts."""
    return name.replace(CHECKPOINT_WRAPPER_PREFIX, "")
