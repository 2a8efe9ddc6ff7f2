"""Are the replicas still the same? A digest of every parameter, compared over the ranks.

Leave alone. Guarded by tests/test_drift.py. For backends that keep a whole copy on each rank (DDP).
"""

import torch
import torch.distributed as dist

from src.inputs import Failure


def digests(model: torch.nn.Module) -> torch.Tensor:
    """Return 64 bits for each parameter, on the host: those of its values, so that one flipped bit changes them."""
    found = [torch.hash_tensor(parameter.detach()).view(torch.int64) for parameter in model.parameters()]
    return torch.stack(found).cpu()


def check(accelerator, agree, model: torch.nn.Module, step: int) -> None:
    """Raise Failure on every rank, naming rank and first parameter, if some replica is not bitwise that of most ranks.

    Collective; costs one pass over the parameters and eight bytes of each per rank."""
    if accelerator.num_processes == 1:
        return
    mine = digests(model)
    every = [torch.empty_like(mine) for _ in range(accelerator.num_processes)]
    dist.all_gather(every, mine, group=agree.group)
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
