"""Sharded tensors (DTensor and those of DeepSpeed): detection, gathering, norm, parameter names.

Tests: tests/engine/distributed/test_fsdp2.py, tests/addons/backends/test_tensor_parallel.py.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from engine.process.private_apis import CHECKPOINT_WRAPPER_PREFIX


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
    return value.detach().full_tensor() if is_partial(value) else value.detach()


def local_part(value: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor, in the same memory; call it under no_grad."""
    return value.to_local() if isinstance(value, torch.distributed.tensor.DTensor) else value


def reshard(model: torch.nn.Module) -> None:
    """Free gathered weights: then the model names its shards, and the next forward pass gathers them again.

    accelerate keeps those of the last layers gathered after a forward pass, so that a second evaluation with other
    weights would use them."""
    for part in model.modules():
        if isinstance(part, torch.distributed.fsdp.FSDPModule):
            part.reshard()


def total_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm over all tensors, some of which may be DTensors: then this is a collective of one number.

    torch's own function accepts only one device mesh. A value that is replicated on several ranks counts once, and the
    result is bitwise the same on every rank."""
    if not any(is_partial(tensor) for tensor in tensors):
        return torch.nn.utils.get_total_norm(tensors)
    squares = []
    for local in tensors:
        shards = 1
        if isinstance(local, torch.distributed.tensor.DTensor):
            sharded_dims = [dim for dim, placement in enumerate(local.placements) if not placement.is_replicate()]
            shards = math.prod(local.device_mesh.size(dim) for dim in sharded_dims)
            local = local.to_local()
        wide = local.float() if local.dtype.itemsize < 4 else local
        # Each value is on (world size / shards) ranks. Times `shards`, the all-reduce counts it (world size) times.
        squares.append(torch.linalg.vector_norm(wide) ** 2 * shards)
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).sqrt()


def plain_name(name: str) -> str:
    """Return the name of a parameter without the prefix that activation checkpointing inserts."""
    return name.replace(CHECKPOINT_WRAPPER_PREFIX, "")
