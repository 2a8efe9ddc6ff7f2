"""torch.compile and activation checkpointing, each per layer; functions that are always compiled on accelerators.

Tests: tests/engine/models/test_compile_and_recompute.py.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from engine.config.addon import Addon, overrides
from engine.config.errors import UsageError, one_line, warn
from engine.config.option import Recomputation
from engine.config.run_config import RunConfig
from engine.process import private_apis


def compile_and_recompute(model: torch.nn.Module, cfg: RunConfig, one_width: bool = False) -> torch.nn.Module:
    """Return the same model, set up as the run file (YAML) says. The names of its parameters do not change.

    `one_width`: all rows have one width. Then torch compiles each shape on its own, unless something else changes shapes
    (`shapes_repeat`). By default, when torch meets a second shape it recompiles for all shapes, and those kernels are
    slower."""
    if cfg.gradient_checkpointing is not False:
        recompute_activations(model, cfg.gradient_checkpointing)
    if cfg.compile:
        layers = repeated_layers(model)
        for module in (*layers, *norms_outside(model, layers)):
            # In place: torch.compile(module) would rename all parameters to _orig_mod.…
            module.compile(dynamic=False if one_width and shapes_repeat(cfg) else None)
    return model


def recompute_activations(model: torch.nn.Module, given: bool | Recomputation) -> None:
    """Recompute activations in the backward pass, all of them or as the mapping `given` says.

    Raise UsageError for a model that cannot, or that would ignore the mapping."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UsageError(f"gradient_checkpointing: {type(model).__name__} does not support it: set it to false")
    # The reentrant form would all-reduce DDP gradients twice. Recomputation uses the same dropout masks.
    arguments = {"use_reentrant": False}
    if isinstance(given, bool):
        model.activation_checkpointing_enable(arguments)
        return
    grade = dict(given)
    if grade.get("offload") and not has_device_memory():  # transformers 5.23 would ask for pinned memory, and fail
        grade["offload"] = False
        warn("gradient_checkpointing: offload is ignored, because on a CPU activations are in host memory already")
    names = inspect.signature(model.activation_checkpointing_enable).parameters
    if "every_n_layers" in names:
        model.activation_checkpointing_enable(arguments, **grade)
    if not recomputing_layers(model):
        raise UsageError(
            f"gradient_checkpointing: {type(model).__name__} is no model of transformers with layers that can recompute "
            "one by one, so it would ignore every_n_layers and offload: set it to true or false"
        )


def has_device_memory() -> bool:
    """Return whether this machine has an accelerator, with memory of its own."""
    return torch.accelerator.is_available()


def recomputing_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers that transformers recomputes one by one: each keeps only its input."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return [layer for layer in layers if layer.gradient_checkpointing]


def shapes_repeat(cfg: RunConfig) -> bool:
    """Return whether only the end of an epoch changes the number of rows or the width of micro-batches.

    False for a budget of tokens and warmups of sizes: torch stops compiling after eight shapes."""
    grows = any(overrides(each, Addon.change_rows, Addon.step_sizes) for each in cfg.addons)
    return not cfg.per_device_batch_tokens and not grows


def repeated_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the repeated layers, or [model] if it has none. The layers share the code compiled for the first one."""
    names = private_apis.layer_class_names(model)
    return [module for module in model.modules() if type(module).__name__ in names] or [model]


def norms_outside(model: torch.nn.Module, layers: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the norms outside of the repeated layers, such as that before the head, but not torch's own.

    Those of transformers are six kernels forward and a dozen backward: 1.4 % of a step of 124M on an H100."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    norms = [module for module in model.modules() if "Norm" in type(module).__name__ and id(module) not in inside]
    return [module for module in norms if not type(module).__module__.startswith("torch.")]


def compiled_graphs(cfg: RunConfig) -> dict[str, int]:
    """Return {"graphs": number of graphs that torch.compile has made} for a train line; an empty dict without `compile`.

    The graphs of losses, which take any number of rows, do not count. torch warns itself when there are too many."""
    return {"graphs": private_apis.count_compiled_graphs() - CompiledOnAccelerators.count} if cfg.compile else {}


class CompiledOnAccelerators:
    """A function whose first two arguments are tensors of rows, compiled by torch.compile unless they are on a CPU,
    where compiling would delay each start by seconds. Where compilation fails, it runs uncompiled, after one warning.

    It rounds in the same way in every process: the number of rows is dynamic from the beginning, kernels are chosen
    without measurements on the device, and the first call is one with FIRST_ROWS rows of zeros. So the kernels do not
    depend on the micro-batch that comes first, which is another one on each rank and in a resumed run."""

    FIRST_ROWS = 1024
    count = 0  # compiled cases of all such functions

    def __init__(self, function: Callable, uncompiled_devices: tuple[str, ...] = ("cpu",)):
        self.function = function
        self.uncompiled_devices = uncompiled_devices
        self.compiled: Callable | None = None
        self.failed = False
        self.tried = set()

    def __call__(self, *arguments: Any) -> Any:
        """Return what the function returns, compiled if `compiles` was true for such arguments."""
        if self.compiled is None or len(arguments[0]) < 2:  # torch would compile again for no row, and for one
            return self.function(*arguments)
        with torch.compiler.set_stance("default"):  # an evaluation tells torch to run layers uncompiled
            return self.compiled(*arguments)

    def compiles(self, *arguments: Any) -> bool:
        """Return whether calls with such arguments, and any number of rows, are compiled. Compile at the first one."""
        device = arguments[0].device.type
        if self.failed or device in self.uncompiled_devices:
            return False
        precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        # What a compiled graph depends on.
        inputs = [(x.dtype, x.requires_grad) if torch.is_tensor(x) else id(x) for x in arguments]
        shapes = [x.shape for x in arguments[2:] if torch.is_tensor(x)]
        case = (precision, torch.is_grad_enabled(), *inputs, *shapes)
        if case not in self.tried:
            try:
                self._compile(*arguments)
                self.tried.add(case)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self.compiled = None
                self.failed = True
                warn(
                    f"the loss is computed uncompiled, several times slower, because torch.compile failed: {one_line(error)}"
                )
        return not self.failed

    def _compile(self, *arguments: Any) -> None:
        self.compiled = self.compiled or private_apis.compile_for_any_rows(self.function)
        rows = [torch.zeros(self.FIRST_ROWS, *x.shape[1:], dtype=x.dtype, device=x.device) for x in arguments[:2]]
        inputs = [zeros.requires_grad_(x.requires_grad) for zeros, x in zip(rows, arguments[:2], strict=True)]
        loss = self(*inputs, *arguments[2:])["loss"]
        if loss.requires_grad:
            sources = [x for x in (*inputs, *arguments[2:]) if torch.is_tensor(x) and x.requires_grad]
            torch.autograd.grad(loss, sources)
        CompiledOnAccelerators.count += 1
