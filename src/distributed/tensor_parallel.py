"""Tensor parallelism: split the layers over processes that read the same data.

torch's `parallelize_module` shards them by the plan that transformers ships with the model. Embedding, norms and head stay
whole. Tests: tests/distributed/test_tensor_parallel.py.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from src.config.errors import UsageError
from src.runtime import private_apis

if TYPE_CHECKING:
    from accelerate import Accelerator


def tp_size(accelerator: "Accelerator") -> int:
    """Return how many processes compute each micro-batch together."""
    mesh = accelerator.parallelism_config
    return mesh.tp_size if mesh else 1


def data_parallel_rank_and_size(accelerator: "Accelerator") -> tuple[int, int]:
    """Return rank and world size for the data: the processes of one tensor parallel group count as one."""
    count = tp_size(accelerator)
    return accelerator.process_index // count, accelerator.num_processes // count


def split_layers(accelerator: "Accelerator", model: torch.nn.Module) -> None:
    """Shard in place the layers of a model that every process holds whole; raise UsageError if that would not be exact."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if (count := tp_size(accelerator)) == 1:
        return
    styles, config = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}, model.config
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if not plan or set(plan.values()) - styles.keys():
        kinds = ", ".join(sorted({*plan.values()} - styles.keys())) or "no plan"
        raise UsageError(f"tp_size is {count}, but transformers has {kinds} for {config.model_type}: remove tp_size")
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    sizes = {name: getattr(config, name, None) or 0 for name in names}
    if any(number % count for number in sizes.values()):
        raise UsageError(f"tp_size is {count}, which does not divide all of {sizes}")
    # Inside the sharded layers, processes would draw the same masks for different heads.
    if dropouts := [name for name, value in config.to_dict().items() if "drop" in name and value]:
        raise UsageError(f"tp_size is {count}: set {', '.join(dropouts)} of the model to 0")
    mesh = accelerator.torch_device_mesh["tp"]
    parallelize_module(model.base_model, mesh, {name: styles[style]() for name, style in plan.items()})
    private_apis.skip_tensor_parallel_preparation(accelerator, count)


def split_by_sharding(group: dict) -> list[dict]:
    """Return a parameter group as two, sharded and whole parameters: torch's optimizers do not take both together."""
    parts = [[p for p in group["params"] if isinstance(p, DTensor) == sharded] for sharded in (False, True)]
    return [group | {"params": part} for part in parts if part]


def clip(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale gradients down to a common norm of `max_norm`; return the norm before, bitwise the same on every rank.

    torch's own function takes shards of one mesh only. A value that several ranks hold counts once."""
    gradients, squares = [], []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        local, shards = parameter.grad, 1
        if isinstance(local, DTensor):
            mesh, placements = local.device_mesh, local.placements
            shards = math.prod(mesh.size(dim) for dim, kind in enumerate(placements) if not kind.is_replicate())
            local = local.to_local()
        gradients.append(local)
        wide = local.float() if local.dtype.itemsize < 4 else local
        # (world size / shards) ranks hold each value: times `shards`, the sum over ranks counts it world size times.
        squares.append(torch.linalg.vector_norm(wide) ** 2 * shards)
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    norm = (total / dist.get_world_size()).sqrt()
    private_apis.multiply_all_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
