"""torch.compile and activation checkpointing, layer by layer; TF32.

Tests: tests/models/test_compile_and_recompute.py.
"""

import torch

from src.config.errors import UsageError, warn
from src.config.schema import RunConfig
from src.runtime import private_apis


def compile_and_recompute(model: torch.nn.Module, cfg: RunConfig, device: torch.device) -> torch.nn.Module:
    """Return the same model, set up as the run file says; the names of its parameters do not change."""
    if cfg.tf32:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
            torch.set_float32_matmul_precision("high")
        else:
            warn("tf32 is ignored: it needs an NVIDIA GPU of the Ampere generation or later")
    if cfg.gradient_checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise UsageError(
                f"gradient_checkpointing is true, but {type(model).__name__} does not offer it: set it to false"
            )
        # Not reentrant: that form would reduce gradients of DDP twice. It keeps the dropout masks.
        model.activation_checkpointing_enable({"use_reentrant": False})
    if cfg.compile:
        for layer in repeated_layers(model):
            layer.compile()  # in place: torch.compile(layer) would rename all parameters to _orig_mod.…
    return model


def repeated_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers that a model repeats, which share the code compiled for the first one; else the model."""
    names = private_apis.layer_class_names(model)
    return [module for module in model.modules() if type(module).__name__ in names] or [model]


class CompileCounter:
    """Counts the graphs that torch.compile has compiled, and warns once when it stops compiling."""

    def __init__(self, cfg: RunConfig):
        self.enabled, self.warned = cfg.compile, False

    def line(self) -> dict[str, int]:
        """Return the number of graphs for a train line; nothing without `compile`."""
        if not self.enabled:
            return {}
        count, limit = private_apis.compiled_graphs()
        if count >= limit and not self.warned:
            self.warned = True
            warn(
                f"torch.compile has compiled {count} graphs, because shapes or types differ between micro-batches; after "
                f"{limit} graphs of one layer it runs the rest uncompiled: give --packing true or "
                "--pad_to_multiple_of 64"
            )
        return {"graphs": count}
