"""Tensors of which each process holds a part: test for them, gather them, name them."""

from collections.abc import Callable
from typing import NamedTuple

import torch


class ShardedTensorRef(NamedTuple):
    """A tensor of which this process holds a part, in a way that torch does not know."""

    nbytes: int  # of the whole
    whole: Callable[[], torch.Tensor]  # a collective


def is_partial(value) -> bool:
    return isinstance(value, ShardedTensorRef | torch.distributed.tensor.DTensor)


def gather_full(value) -> torch.Tensor:
    """Return the whole tensor; a collective if it is in parts, in which each process has it for a moment."""
    if isinstance(value, ShardedTensorRef):
        return value.whole()
    return value.detach().full_tensor() if is_partial(value) else value


def plain_name(name: str) -> str:
    """Return the name of a parameter without what activation checkpointing puts in."""
    return name.replace("_checkpoint_wrapped_module.", "")
