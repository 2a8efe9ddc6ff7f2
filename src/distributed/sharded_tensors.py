"""Sharded tensors (DTensor and those of DeepSpeed): detection, gathering, parameter names.

Tests: tests/checkpointing/test_sharded.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from src.runtime.private_apis import CHECKPOINT_WRAPPER_PREFIX


class ShardedTensorRef(NamedTuple):
    """A tensor sharded by DeepSpeed, which does not use torch's DTensor."""

    nbytes: int  # of the full tensor
    gather: Callable[[], torch.Tensor]  # a collective that returns the full tensor


def is_partial(value: Any) -> bool:
    """Return True for a sharded tensor, False for any other value."""
    return isinstance(value, ShardedTensorRef | torch.distributed.tensor.DTensor)


def gather_full(value: Any) -> torch.Tensor:
    """Return the full tensor. For a sharded tensor this is a collective, and every process holds the full tensor."""
    if isinstance(value, ShardedTensorRef):
        return value.gather()
    return value.detach().full_tensor() if is_partial(value) else value


def local_part(value: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor, in the same memory; call it under no_grad."""
    return value.to_local() if isinstance(value, torch.distributed.tensor.DTensor) else value


def plain_name(name: str) -> str:
    """Return the name of a parameter without the prefix that activation checkpointing inserts."""
    return name.replace(CHECKPOINT_WRAPPER_PREFIX, "")
