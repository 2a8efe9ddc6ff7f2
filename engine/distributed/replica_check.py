"""Comparison of the model replicas of DDP: a hash of every parameter and saved buffer, equal on all ranks.

Tests: tests/engine/distributed/test_replica_check.py.
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import xxhash

from engine.config.errors import Failure
from engine.distributed.running_statistics import persistent_buffers

if TYPE_CHECKING:
    from engine.distributed.backends import Backend

CHUNK = 1 << 22
INTEGER_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests(model: torch.nn.Module) -> torch.Tensor:
    """Return a 64-bit hash of each parameter and persistent buffer, as a vector on the host.

    It depends on every bit of the values and on their order."""
    tensors = [tensor.detach().reshape(-1) for tensor in _named_tensors(model).values()]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return torch.tensor([xxhash.xxh3_64_intdigest(t.view(torch.uint8).numpy()) - (1 << 63) for t in tensors])
    return torch.stack([_digest_on_device(tensor) for tensor in tensors]).cpu()


def _named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | persistent_buffers(model)


def _digest_on_device(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of SplitMix64(bits of a value, its index) over all values, as a scalar on the device."""
    bits = flat.view(INTEGER_OF_WIDTH[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, bits.numel(), CHUNK):
        x = bits[start : start + CHUNK].long()
        x = x + torch.arange(start + 1, start + 1 + x.numel(), device=x.device) * -7046029254386353131
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
            x = (x ^ (x >> shift)) * factor
        total += (x ^ (x >> 31)).sum()
    return total


def check_replicas(backend: "Backend", model: torch.nn.Module, step: int, is_due: bool = True) -> None:
    """Raise Failure on every rank if two replicas differ in a bit; the message names rank and first tensor.

    Collective. Reads every tensor once and sends eight bytes per tensor and rank. Does nothing if not
    `is_due`, on one process, and if the model is sharded."""
    if not is_due or backend.accelerator.num_processes == 1 or backend.is_sharded:
        return
    hashes = digests(model)
    ranks = [torch.empty_like(hashes) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, hashes, group=backend.hosts.group)
    table = torch.stack(ranks)  # (ranks, tensors)
    differs = (table != table[0]).any(dim=0)
    if not differs.any():
        return
    column = int(differs.nonzero()[0])
    name = list(_named_tensors(model))[column]
    if len(table) == 2:
        which = "ranks 0 and 1 differ"
    else:
        majority = table[:, column].mode().values  # in a tie, the smaller hash
        wrong = (table[:, column] != majority).nonzero().flatten().tolist()
        which = f"rank {', '.join(map(str, wrong))} differs from the others"
    raise Failure(
        f"the model replicas differ at step {step}: {which}, first in {name}. Possible causes: faulty memory, code "
        "that changes weights on one rank, or random numbers that differ between ranks (docs/techniques.md: `noise`). This "
        "step was not saved; the same command resumes from the last checkpoint"
    )
