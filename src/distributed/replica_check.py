"""Comparison of the model replicas of all ranks (DDP) by a hash of every parameter.

Tests: tests/distributed/test_replica_check.py.
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import xxhash

from src.config.errors import Failure

if TYPE_CHECKING:
    from src.distributed.host_group import HostGroup

CHUNK = 1 << 22
INTEGER_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests(model: torch.nn.Module) -> torch.Tensor:
    """Return a 64-bit hash of each parameter, of every bit of its values and their order, as a vector on the host."""
    parameters = [parameter.detach().reshape(-1) for parameter in model.parameters()]
    if all(parameter.device.type == "cpu" for parameter in parameters):
        return torch.tensor([xxhash.xxh3_64_intdigest(p.view(torch.uint8).numpy()) - (1 << 63) for p in parameters])
    return torch.stack([_digest_on_device(parameter) for parameter in parameters]).cpu()


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


def check_replicas(host_group: "HostGroup", model: torch.nn.Module, step: int) -> None:
    """Raise Failure on every rank if two replicas differ in a bit; the message names rank and first parameter.

    Collective. Reads every parameter once and sends eight bytes per parameter and rank."""
    mine = digests(model)
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, mine, group=host_group.group)
    table = torch.stack(ranks)  # (ranks, parameters)
    differs = (table != table[0]).any(dim=0)
    if not differs.any():
        return
    column = int(differs.nonzero()[0])
    name = [name for name, _ in model.named_parameters()][column]
    if len(table) == 2:
        which = "ranks 0 and 1 differ"
    else:
        majority = table[:, column].mode().values  # in a tie, the smaller hash
        wrong = (table[:, column] != majority).nonzero().flatten().tolist()
        which = f"rank {', '.join(map(str, wrong))} differs from the others"
    raise Failure(
        f"the model replicas differ at step {step}: {which}, first in {name}. Possible causes: faulty memory, or code "
        "that changes weights on one rank. This step was not saved; the same command resumes from the last checkpoint"
    )
