"""Tensor parallelism: layers sharded over processes that read the same data.

torch's `parallelize_module` shards the layers by the plan that transformers ships with the model. Embeddings, norms and
the output head are not sharded. Tests: tests/addons/backends/test_tensor_parallel.py.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from engine.config.errors import UsageError
from engine.config.run_config import RunConfig
from engine.distributed.backends import Backend
from engine.distributed.fsdp2 import FSDP2
from engine.distributed.sharded_tensors import total_norm

if TYPE_CHECKING:
    from accelerate import Accelerator

NEEDS = (
    "tensor parallelism needs no compile, and either FSDP2 with fsdp_cpu_ram_efficient_loading: false, or neither FSDP "
    "nor DeepSpeed"
)


class TensorParallel(Backend):
    """Each layer split over some processes, alone or with copies; the base class is DDP, or FSDP2 (below)."""

    is_sharded = True
    unsupported = ("ddp_find_unused_parameters", "peft")

    def __init__(self, accelerator: "Accelerator", cfg: RunConfig):
        self.ranks_per_batch = accelerator.parallelism_config.tp_size
        super().__init__(accelerator, cfg)
        if cfg.compile or getattr(self, "main_process_builds", False):
            raise UsageError(f"tp_size is {self.ranks_per_batch}: {NEEDS}")

    @property
    def name(self) -> str:
        mesh = self.accelerator.parallelism_config
        shards = f", FSDP2 over {mesh.dp_shard_size}" if isinstance(self, FSDP2) else ""
        copies = f", {mesh.dp_replicate_size} copies" if mesh.dp_replicate_enabled else ""
        return f"tensor parallelism over {self.ranks_per_batch} processes{shards}{copies}"

    def build_model(
        self, task: Any, weights: Any, on_built: Callable[[torch.nn.Module], None] | None = None
    ) -> torch.nn.Module:
        """Return the task's model on the CPU, with its layers split."""
        model = super().build_model(task, weights, on_built)
        split_layers(self.accelerator, model)
        return model

    def prepare(self, model_with_loss: torch.nn.Module, optimizer: torch.optim.Optimizer):
        """Return what the base class returns, for an optimizer with groups of whole or of sharded parameters alone."""
        groups = enumerate(optimizer.param_groups)  # as one process has them, for checkpoints
        optimizer.param_groups[:] = [
            part | {"original_group": i} for i, group in groups for part in split_by_sharding(group)
        ]
        return super().prepare(model_with_loss, optimizer)

    def clip(self, parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clip gradients to a total norm of `max_norm`; return the norm before clipping, bitwise the same on every rank."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = total_norm(gradients)
        local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        multiply_all_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


class TensorParallelFSDP2(TensorParallel, FSDP2):
    """Each layer split over some processes, and the parts sharded over the others."""


def backend_type(accelerator: "Accelerator") -> type[TensorParallel] | None:
    """Return the class for a launch that splits layers, None for any other; raise UsageError for DeepSpeed."""
    mesh = accelerator.parallelism_config
    if mesh is None or mesh.tp_size == 1:
        return None
    kind = accelerator.distributed_type.value
    if kind == "DEEPSPEED":
        raise UsageError(f"tp_size is {accelerator.parallelism_config.tp_size}: {NEEDS}")
    return TensorParallelFSDP2 if kind == "FSDP" else TensorParallel


def split_layers(accelerator: "Accelerator", model: torch.nn.Module) -> None:
    """Shard the layers of a whole model in place; raise UsageError if its results would then differ."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    count = accelerator.parallelism_config.tp_size
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    config: Any = getattr(model, "config", None)  # a module that is not of transformers has none, and no plan
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if not plan or set(plan.values()) - styles.keys():
        unsupported = ", ".join(sorted({*plan.values()} - styles.keys()))
        there = f"a plan with the unsupported split {unsupported}" if unsupported else "no plan"
        raise UsageError(
            f"tp_size is {count}, but transformers has {there} for {getattr(config, 'model_type', type(model).__name__)}: remove tp_size"
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
    skip_tensor_parallel_preparation(accelerator, count)


def split_by_sharding(group: dict) -> list[dict]:
    """Split a parameter group into whole and sharded parameters, because torch's optimizers do not take a mix."""
    parts = [[p for p in group["params"] if isinstance(p, DTensor) == sharded] for sharded in (False, True)]
    return [group | {"params": part} for part in parts if part]


# ---- private APIs of torch 2.13 and accelerate 1.15; the tests named above fail if one has changed ----------------------


def multiply_all_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all tensors in place in one kernel. Public functions do not take DTensors of different meshes."""
    torch._foreach_mul_(tensors, factor)


def skip_tensor_parallel_preparation(accelerator: Any, tp_size: int) -> None:
    """Make `prepare` keep a tensor-parallel model unchanged: accelerate imports a class that transformers 5.1 removed."""

    def mark_as_parallel(*objects):
        for item in objects:
            if isinstance(item, torch.nn.Module):
                item.tp_size = tp_size  # accelerate refuses a model without it
        return objects

    accelerator._prepare_tp = mark_as_parallel
