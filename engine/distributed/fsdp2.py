"""FSDP2 and HSDP: model built on the main process, sharding, gradient reduction.

Tests: tests/engine/distributed/test_fsdp2.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from engine.config.errors import Failure, UsageError
from engine.config.run_config import RunConfig
from engine.distributed import optimizer_state
from engine.distributed.backends import Backend
from engine.distributed.host_group import run_on_main
from engine.distributed.model_structure import Structure, make_alike, structure_of
from engine.distributed.sharded_tensors import gather_full
from engine.process import private_apis

if TYPE_CHECKING:
    from accelerate import Accelerator

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}  # mixed_precision -> dtype of matrix products


class FSDP2(Backend):
    """Weights, gradients and moments sharded over all processes; with HSDP over groups that each hold a full copy."""

    is_sharded = True

    def __init__(self, accelerator: "Accelerator", cfg: RunConfig):
        super().__init__(accelerator, cfg)
        self.sync_every_micro_batch = cfg.sync_each_batch is not False  # less memory: no unsharded gradients
        self.main_process_builds = accelerator.state.fsdp_plugin.cpu_ram_efficient_loading
        dtype = LOW_PRECISION.get(accelerator.mixed_precision)
        if dtype is not None:
            from torch.distributed.fsdp import MixedPrecisionPolicy

            # accelerate's own policy would reduce gradients, and return the loss, in 16 bits.
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            accelerator.state.fsdp_plugin.mixed_precision_policy = policy

    @property
    def name(self) -> str:
        mesh = self.accelerator.parallelism_config
        if mesh is None or mesh.dp_replicate_size == 1:
            return "FSDP2"
        return f"HSDP: {mesh.dp_replicate_size} copies, each over {mesh.dp_shard_size} processes"

    # ---- before training ---------------------------------------------------------------------------------------------

    def build_model(
        self, task: Any, weights: Any, on_built: Callable[[torch.nn.Module], None] | None = None
    ) -> torch.nn.Module:
        """Return the task's model on the CPU; only the main process loads or initializes its weights.

        The other processes build it with empty tensors, alike before and after add-ons change it; their memory is never
        touched. `prepare` sends each process its shard. A UsageError on one process is raised on all processes."""
        if not self.main_process_builds:
            return super().build_model(task, weights, on_built)
        build = super().build_model
        model = None
        structures = []

        def build_on_main() -> tuple[dict, list[Structure]]:
            nonlocal model
            model = build(task, weights, lambda built: structures.append(structure_of(built)))
            structures.append(structure_of(model))
            names = getattr(task, "attributes_from_weights", ())
            attributes = {name: getattr(task, name) for name in names if hasattr(task, name)}
            return attributes, structures

        attributes, (before, after) = run_on_main(self.accelerator, build_on_main)
        errors: set[str] = set()
        if model is None:
            vars(task).update(attributes)
            try:
                model = task.build_model(weights, empty=True, on_built=lambda built: make_alike(built, before))
                make_alike(model, after)
            except UsageError as error:
                errors.add(str(error))
        errors_of_ranks = self.hosts.union(errors)
        if errors_of_ranks:
            raise UsageError(errors_of_ranks[0])
        return model

    def wrap(self, model_with_loss: torch.nn.Module, optimizer: torch.optim.Optimizer):
        """Return (sharded module, its optimizer); raise an error if sharding untied weights or changed a dtype."""
        for parameter in model_with_loss.parameters():
            parameter.data = parameter.data.contiguous()  # FSDP2 refuses other layouts
        sharing = layers_that_share(model_with_loss)
        if sharing:  # torch refuses a parameter of two units, at the first step
            names = private_apis.layer_class_names(model_with_loss.model)
            private_apis.set_layer_class_names(model_with_loss, names - sharing)
        dtypes = {p.dtype for p in model_with_loss.parameters() if p.requires_grad}
        count = len(list(model_with_loss.parameters()))  # tied weights count once
        early = optimizer_state.flatten(model_with_loss, optimizer) if optimizer.state else {}
        optimizer.state.clear()  # its keys are parameters, which sharding replaces
        with self._broadcast_buffers(model_with_loss):
            module, optimizer = super().wrap(model_with_loss, optimizer)
        if early:  # as the main process has made it, for the others may have no weights
            numbers = {path: value for path, value in early.items() if not torch.is_tensor(value)}
            numbers = run_on_main(self.accelerator, lambda: numbers)
            reader = EarlyState(early, self.accelerator.device)
            optimizer_state.restore(model_with_loss, optimizer, reader, numbers)
        if not isinstance(module, torch.distributed.fsdp.FSDPModule):
            raise Failure("the launch requests FSDP2, but accelerate has not sharded the model")
        if len(list(model_with_loss.parameters())) != count:
            raise Failure(
                "sharding has untied the model's tied weights: set fsdp_cpu_ram_efficient_loading to false in the accelerate file"
            )
        for name, parameter in model_with_loss.named_parameters():
            if parameter.requires_grad and parameter.dtype not in dtypes:
                raise UsageError(
                    f"dtype is {self.cfg.dtype}, but FSDP2 keeps float32 weights for mixed_precision, as of {name}: set "
                    "mixed_precision: 'no'"
                )
        # Otherwise ranks that use different parameters in a step would reduce different ones together: a wrong gradient,
        # or a crash. Now a parameter that a rank does not use has a zero gradient there.
        module.set_reduce_scatter_unused_params(True)
        return module, optimizer

    @contextmanager
    def _broadcast_buffers(self, model_with_loss: torch.nn.Module) -> Iterator[None]:
        """Broadcast the main process's buffers. accelerate 1.15 keeps those of each process, and shards persistent ones."""
        buffers = []
        persistent = []
        if self.main_process_builds:
            saved = model_with_loss.state_dict().keys()
            names = [name for name, _ in model_with_loss.named_buffers(remove_duplicate=False)]
            buffers = [_owner(model_with_loss, name) for name in names]
            persistent = [_owner(model_with_loss, name) for name in names if name in saved]
        for module, name in buffers:
            buffer = getattr(module, name).to(self.accelerator.device).contiguous()
            torch.distributed.broadcast(buffer.view(-1).view(torch.uint8), 0)  # gloo does not know every dtype
            module.register_buffer(name, buffer, persistent=False)
        # A batch norm that finds no count of its batches in a state dict would add one, as for old checkpoints.
        tracking = [module for module, name in persistent if name == "num_batches_tracked"]
        for module in tracking:
            module.track_running_stats = False
        yield
        for module in tracking:
            module.track_running_stats = True
        for module, name in persistent:
            module.register_buffer(name, getattr(module, name), persistent=True)

    # ---- in a step ---------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, module: torch.nn.Module, unless: bool) -> Iterator[None]:
        """Reduce-scatter gradients after each micro-batch or only the last; with HSDP, all-reduce after the last."""
        module.set_requires_gradient_sync(unless or self.sync_every_micro_batch)
        module.set_requires_all_reduce(unless)
        yield


class EarlyState:
    """The state that an optimizer has before its first step (Adagrad), read like a checkpoint: rank 0 sends its values."""

    def __init__(self, flat: dict[str, Any], device: torch.device):
        self.where = {path: value for path, value in flat.items() if torch.is_tensor(value)}
        self.device = device

    def like(self, path: str, parameter: torch.Tensor | None) -> torch.Tensor:
        """Return the tensor sharded like `parameter`, the full tensor if it has another shape. A collective."""
        full = gather_full(self.where[path])
        value = full.to(self.device).contiguous()
        if isinstance(parameter, DTensor) and parameter.shape == value.shape:
            return distribute_tensor(value, parameter.device_mesh, parameter.placements)
        torch.distributed.broadcast(value, 0)
        return value.to(full.device)


def _owner(model: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """Return (the module that holds the buffer `name`, the last part of the name)."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def layers_that_share(model: torch.nn.Module) -> set[str]:
    """Return the class names of repeated layers that share a parameter with a module outside of them."""
    owners: dict[int, set[int]] = {}  # id of a parameter -> ids of the modules that hold it
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    names = private_apis.layer_class_names(model)
    layers = [module for module in model.modules() if type(module).__name__ in names]
    sharing = set()
    for layer in layers:
        inside = {id(module) for module in layer.modules()}
        if any(not owners[id(parameter)] <= inside for parameter in layer.parameters()):
            sharing.add(type(layer).__name__)
    return sharing
