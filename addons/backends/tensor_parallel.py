"""Tensor parallelism: layers sharded over processes that read the same data.

torch's `parallelize_module` shards the layers by the plan that transformers ships with the model. Embeddings, norms and
the output head are not sharded. Tests: tests/addons/backends/test_tensor_parallel.py.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from src.config.errors import UsageError
from src.distributed.sharded_tensors import total_norm
from src.runtime import private_apis

if TYPE_CHECKING:
    from accelerate import Accelerator


def tp_size(accelerator: "Accelerator") -> int:
    """Return the tensor parallel size: the number of processes that compute each micro-batch together."""
    mesh = accelerator.parallelism_config
    return mesh.tp_size if mesh else 1


def data_parallel_rank_and_size(accelerator: "Accelerator") -> tuple[int, int]:
    """Return (data parallel rank, data parallel size): the processes of one tensor parallel group count as one."""
    count = tp_size(accelerator)
    return accelerator.process_index // count, accelerator.num_processes // count


def split_layers(accelerator: "Accelerator", model: torch.nn.Module) -> None:
    """Shard the layers of a whole model in place; raise UsageError if its results would then differ."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if (count := tp_size(accelerator)) == 1:
        return
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    config: Any = getattr(model, "config", None)  # a module that is not of transformers has none, and no plan
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if not plan or set(plan.values()) - styles.keys():
        unsupported = ", ".join(sorted({*plan.values()} - styles.keys()))
        found = f"a plan with the unsupported split {unsupported}" if unsupported else "no plan"
        raise UsageError(
            f"tp_size is {count}, but transformers has {found} for {getattr(config, 'model_type', type(model).__name__)}: remove tp_size"
        )
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    sizes = {name: getattr(config, name, None) or 0 for name in names}
    if any(number % count for number in sizes.values()):
        raise UsageError(f"tp_size is {count}, which does not divide all of {sizes} of the model: change or remove it")
    # Inside sharded layers, all processes would draw the same dropout masks for different heads.
    if dropouts := [name for name, value in config.to_dict().items() if "drop" in name and value]:
        raise UsageError(f"tp_size is {count}: set {', '.join(dropouts)} to 0 in the model's config")
    mesh = accelerator.torch_device_mesh["tp"]
    parallelize_module(model.base_model, mesh, {name: styles[style]() for name, style in plan.items()})
    private_apis.skip_tensor_parallel_preparation(accelerator, count)


def split_by_sharding(group: dict) -> list[dict]:
    """Split a parameter group into whole and sharded parameters, because torch's optimizers do not take a mix."""
    parts = [[p for p in group["params"] if isinstance(p, DTensor) == sharded] for sharded in (False, True)]
    return [group | {"params": part} for part in parts if part]


def clip(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clip gradients to a total norm of `max_norm`; return the norm before clipping, bitwise the same on every rank."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = total_norm(gradients)
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    private_apis.multiply_all_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
