"""Compare the replicas of all ranks by a hash of every parameter.

Tests: tests/distributed/test_replica_check.py. For backends that keep a whole copy on each rank (DDP).
"""

import torch
import torch.distributed as dist
import xxhash

from src.config.errors import Failure
from src.distributed.strategies import is_sharded

CHUNK = 1 << 22
WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests(model: torch.nn.Module) -> torch.Tensor:
    """Return 64 bits for each parameter, on the host, that depend on every bit of its values and on their places."""
    parameters = [parameter.detach().reshape(-1) for parameter in model.parameters()]
    if all(parameter.device.type == "cpu" for parameter in parameters):
        return torch.tensor([xxhash.xxh3_64_intdigest(p.view(torch.uint8).numpy()) - (1 << 63) for p in parameters])
    return torch.stack([_on_device(parameter) for parameter in parameters]).cpu()


def _on_device(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of SplitMix64 over (bits of a value, place), a scalar on the device: nothing is copied to the host."""
    bits, total = flat.view(WIDTH[flat.element_size()]), torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, bits.numel(), CHUNK):
        x = bits[start : start + CHUNK].long()
        x = x + torch.arange(start + 1, start + 1 + x.numel(), device=x.device) * -7046029254386353131
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
            x = (x ^ (x >> shift)) * factor
        total += (x ^ (x >> 31)).sum()
    return total


def check_replicas(accelerator, host_group, model: torch.nn.Module, step: int) -> None:
    """Raise Failure on every rank, naming rank and first parameter, if some replica is not bitwise that of most ranks.

    Collective; costs one pass over the parameters and eight bytes of each per rank."""
    if accelerator.num_processes == 1 or is_sharded(accelerator):  # of shards there is no second copy to compare with
        return
    mine = digests(model)
    every = [torch.empty_like(mine) for _ in range(accelerator.num_processes)]
    dist.all_gather(every, mine, group=host_group.group)
    common = torch.stack(every).mode(dim=0).values  # of two that differ, the smaller: then both are named
    wrong = [rank for rank, theirs in enumerate(every) if not torch.equal(theirs, every[0])]
    if not wrong:
        return
    column = next(i for i in range(len(mine)) if any(theirs[i] != every[0][i] for theirs in every))
    if len(every) > 2:
        wrong = [rank for rank, theirs in enumerate(every) if theirs[column] != common[column]]
        what = f"rank {', '.join(map(str, wrong))} differs from the others"
    else:
        what = "ranks 0 and 1 differ"
    name = [name for name, _ in model.named_parameters()][column]
    raise Failure(
        f"the replicas are no longer the same at step {step}: {what}, first in {name}. Faulty memory, or an edit that "
        "changes weights on one rank; nothing was saved since, and the same command goes on from the last checkpoint"
    )
