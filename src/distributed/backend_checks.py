"""Checks that refuse what would train wrong numbers or hang: settings, model, parameters in a step, replicas that differ.

Tests: tests/distributed/test_unused_parameters.py, tests/distributed/test_replica_check.py, tests/training/.
"""

import re
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import xxhash

from src.config.errors import Failure, UsageError
from src.config.schema import RunConfig
from src.distributed.running_statistics import persistent_buffers
from src.distributed.sharded_tensors import plain_name
from src.runtime import private_apis

if TYPE_CHECKING:
    from src.distributed.backends import Backend

CHUNK = 1 << 22
INTEGER_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_settings(backend: "Backend", cfg: RunConfig) -> None:
    """Raise UsageError for settings that this backend does not support."""
    mesh = backend.accelerator.parallelism_config
    if mesh and (mesh.cp_size > 1 or mesh.sp_size > 1):
        raise UsageError("context and sequence parallelism are not supported: docs/scaling.md says what to use instead")
    for name in backend.unsupported:
        if value := getattr(cfg, name, None):  # it may belong to an add-on that the run file does not name
            raise UsageError(
                f"{name} is {str(value).lower()}, which {backend.name} does not support: remove it, or use DDP or FSDP2 "
                "(accelerate_configs/ddp.yaml, fsdp2.yaml)"
            )


def check_model(backend: "Backend", model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for state that cannot be sharded, a layer that depends on the number of processes, or a
    parameter without an optimizer."""
    if backend.is_sharded:
        check_only_tensors(model)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm) and backend.accelerator.num_processes > 1:
            raise UsageError(
                f"{name} is a SyncBatchNorm, which depends on the number of processes: use BatchNorm; its running statistics "
                "are the same on all processes here"
            )
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trainable = [plain_name(name) for name, p in model.named_parameters() if p.requires_grad and id(p) not in optimized]
    if trainable:
        raise UsageError(
            f"{', '.join(trainable[:5])}: trainable, but in no parameter group of the optimizer: add it to one "
            "(`parameter_groups` in src/training/optimizers.py), or freeze it in `build`"
        )


def check_only_tensors(model: torch.nn.Module) -> None:
    """Raise UsageError if a state dict holds something else than tensors, which can be neither sharded nor saved."""
    if others := [name for name, value in model.state_dict().items() if not isinstance(value, torch.Tensor)]:
        raise UsageError(
            f"{others[0]} of {type(model).__name__} is extra state and not a tensor, which a checkpoint cannot hold: make it "
            "a buffer"
        )


def check_trainable(parameters: dict[str, torch.nn.Parameter], trainable: set[str]) -> None:
    """Raise UsageError if a parameter was frozen or unfrozen after the optimizer and the reduction were built."""
    changed = [name for name, p in parameters.items() if p.requires_grad != (name in trainable)]
    if changed:
        raise UsageError(
            f"requires_grad of {', '.join(changed[:5])} was changed during training, which neither the optimizer nor the "
            "reduction of gradients notices: set it in `build` of the task; to change it later, train the second part "
            "as a run of its own with --init_from CHECKPOINT"
        )


def check_reduced(module: torch.nn.Module, parameters: dict[str, torch.nn.Parameter]) -> None:
    """Raise UsageError if DDP is still waiting for a gradient after the last backward pass of a step.

    Otherwise it says so only in its next forward pass, after an update with gradients that were not reduced."""
    if not isinstance(module, torch.nn.parallel.DistributedDataParallel):
        return
    try:
        private_apis.check_reduced(module)
    except RuntimeError as error:
        names = [name for name, p in parameters.items() if p.requires_grad]
        indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        missing = [names[int(index)] for index in indices[1].split()] if indices else ["some parameters"]
        raise UsageError(
            f"the loss does not use {', '.join(missing[:5])} in this step, and DDP waits for their gradients: freeze them by "
            "the field freeze (of an adapter: name the layers in its exclude_modules), or, if other rows use them, "
            "set --ddp_find_unused_parameters true"
        ) from error


# ---- replicas (DDP), compared by a hash of every parameter and saved buffer ------------------------------------------


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
