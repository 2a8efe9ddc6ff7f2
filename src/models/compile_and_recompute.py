"""torch.compile, activation checkpointing (each per layer) and TF32.

Tests: tests/models/test_compile_and_recompute.py.
"""

import torch

from src.config.errors import UsageError, warn
from src.config.schema import RunConfig
from src.runtime import private_apis


def compile_and_recompute(model: torch.nn.Module, cfg: RunConfig, device: torch.device) -> torch.nn.Module:
    """Return the same model, set up as the run file (YAML) says. The names of its parameters do not change."""
    if cfg.tf32:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
            torch.set_float32_matmul_precision("high")
        else:
            warn("tf32 is ignored: it needs an NVIDIA GPU of the Ampere generation or later")
    check_recompute(model, cfg)
    if cfg.gradient_checkpointing:
        # The reentrant form would all-reduce DDP gradients twice. Recomputation uses the same dropout masks.
        model.activation_checkpointing_enable({"use_reentrant": False})
    if cfg.compile:
        for layer in repeated_layers(model):
            layer.compile()  # in place: torch.compile(layer) would rename all parameters to _orig_mod.…
    return model


def check_recompute(model: torch.nn.Module, cfg: RunConfig) -> None:
    """Raise UsageError if the run file asks for activation checkpointing, which the model does not support."""
    if cfg.gradient_checkpointing and not getattr(model, "supports_gradient_checkpointing", False):
        raise UsageError(
            f"gradient_checkpointing is true, but {type(model).__name__} does not support it: set it to false"
        )


def repeated_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the repeated layers, or [model] if it has none. The layers share the code compiled for the first one."""
    names = private_apis.layer_class_names(model)
    return [module for module in model.modules() if type(module).__name__ in names] or [model]


class CompileCounter:
    """Counts the graphs compiled by torch.compile, and warns once when they reach the recompile limit."""

    def __init__(self, cfg: RunConfig):
        self.enabled, self.warned = cfg.compile, False

    def line(self) -> dict[str, int]:
        """Return {"graphs": number of compiled graphs} for a train line; an empty dict without `compile`."""
        if not self.enabled:
            return {}
        count, limit = private_apis.compiled_graphs()
        if count >= limit and not self.warned:
            self.warned = True
            warn(
                f"torch.compile has compiled {count} graphs, because shapes or dtypes differ between micro-batches. "
                f"After {limit} graphs of one layer, it runs other shapes uncompiled: give --packing true or "
                "--pad_to_multiple_of 64"
            )
        return {"graphs": count}
