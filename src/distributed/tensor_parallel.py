"""Tensor parallelism: split the layers over processes that read the same data.

Tests: tests/distributed/test_tensor_parallel.py. The cut is torch's own `parallelize_module`, by the plan that
transformers ships with the model; processes of one group read the same micro-batches. Embedding, norms and head stay whole.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from src.config.errors import UsageError


def tp_size(accelerator) -> int:
    """Return how many processes compute each micro-batch together."""
    sizes = getattr(accelerator, "parallelism_config", None)
    return sizes.tp_size if sizes else 1


def data_parallel_rank_and_size(accelerator) -> tuple[int, int]:
    """Return rank and world size as far as data goes: processes of one group count as one."""
    return accelerator.process_index // tp_size(accelerator), accelerator.num_processes // tp_size(accelerator)


def check(accelerator, cfg) -> None:
    """Raise UsageError for what is not computed exactly, or not tested, where layers are cut."""
    if (count := tp_size(accelerator)) == 1:
        return
    whole = accelerator.is_fsdp2 and accelerator.state.fsdp_plugin.cpu_ram_efficient_loading
    if whole or accelerator.distributed_type.value == "DEEPSPEED" or cfg.compile:
        raise UsageError(
            f"tp_size is {count}, which takes FSDP2 with fsdp_cpu_ram_efficient_loading: false, or nothing besides, and no "
            "compile"
        )


def apply(accelerator, model: torch.nn.Module) -> None:
    """Cut the layers of a model in place, which every process holds whole; UsageError if that cannot be done exactly."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if (count := tp_size(accelerator)) == 1:
        return
    styles, config = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}, model.config
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if not plan or set(plan.values()) - styles.keys():
        kinds = ", ".join(sorted({*plan.values()} - styles.keys())) or "no plan"
        raise UsageError(f"tp_size is {count}, but transformers has {kinds} for {config.model_type}: leave it out")
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    sizes = {name: getattr(config, name, None) or 0 for name in names}
    if any(number % count for number in sizes.values()):
        raise UsageError(f"tp_size is {count}, which does not divide all of {sizes}")
    # Within what is cut, processes would draw the same masks for different heads.
    if drops := [name for name, value in config.to_dict().items() if "drop" in name and value]:
        raise UsageError(f"tp_size is {count}: set {', '.join(drops)} of the model to 0")
    mesh = accelerator.torch_device_mesh["tp"]
    parallelize_module(model.base_model, mesh, {name: styles[style]() for name, style in plan.items()})

    def leave(*objects):
        """In place of accelerate 1.15's, which needs a class that transformers has up to 5.0 only."""
        for module in (found for found in objects if isinstance(found, torch.nn.Module)):
            module.tp_size = count  # or it refuses a model that nothing else spreads
        return objects

    accelerator._prepare_tp = leave


def split_by_sharding(group: dict) -> list[dict]:
    """Return a parameter group as those of cut and of whole parameters: torch's optimizers do not take both together."""
    parts = [[p for p in group["params"] if isinstance(p, DTensor) == cut] for cut in (False, True)]
    return [group | {"params": part} for part in parts if part]


def clip(parameters, max_norm: float) -> torch.Tensor:
    """Scale gradients down to a common norm of `max_norm`; return the norm before, to the last bit the same on every rank.

    torch's own takes shards of one mesh only. What several ranks hold counts once."""
    gradients, squares = [], []
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        local, parts = gradient, 1
        if isinstance(gradient, DTensor):
            cut = [d for d, placement in enumerate(gradient.placements) if not placement.is_replicate()]
            local, parts = gradient.to_local(), math.prod(gradient.device_mesh.size(d) for d in cut)
        gradients.append(local)
        squares.append(torch.linalg.vector_norm(local.float() if local.dtype.itemsize < 4 else local) ** 2 * parts)
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    norm = (total / dist.get_world_size()).sqrt()
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
