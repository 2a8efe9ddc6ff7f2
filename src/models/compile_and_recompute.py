"""torch.compile and activation checkpointing, layer by layer.

A fork adds its own tricks here. Tests: tests/models/test_compile_and_recompute.py.
"""

import torch

from src.config.errors import UsageError, warn
from src.config.schema import RunConfig


def compile_and_recompute(model: torch.nn.Module, cfg: RunConfig, device: torch.device) -> torch.nn.Module:
    """Return the model itself, set up as the run file asks; names of its parameters stay what they are."""
    if cfg.tf32:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
            torch.set_float32_matmul_precision("high")
        else:
            warn("tf32 is ignored: it takes an NVIDIA GPU of the Ampere generation or later")
    if cfg.gradient_checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise UsageError(f"gradient_checkpointing: {type(model).__name__} does not offer it: leave it out")
        # Not reentrant: that form would reduce gradients of DDP twice. It keeps the dropout masks.
        model.activation_checkpointing_enable({"use_reentrant": False})
    if cfg.compile:
        for block in blocks(model):
            block.compile()  # in place, and not torch.compile(block), which would rename all parameters to _orig_mod.…
    return model


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers that a model repeats, or the model: all of them share what is compiled for the first."""
    names = set(getattr(model, "_no_split_modules", None) or [])
    return [module for module in model.modules() if type(module).__name__ in names] or [model]


class CompileCounter:
    """Counts what torch.compile has compiled, and warns once when it begins to give up."""

    def __init__(self, cfg: RunConfig):
        self.on, self.warned = cfg.compile, False

    def line(self) -> dict[str, int]:
        """Return the number of graphs so far for a train line; nothing without `compile`."""
        if not self.on:
            return {}
        from torch._dynamo import config, utils

        count = utils.counters["stats"]["unique_graphs"]
        if count >= config.recompile_limit and not self.warned:
            self.warned = True
            warn(
                f"torch.compile has compiled {count} graphs, because shapes or types differ from micro-batch to micro-batch; after "
                f"{config.recompile_limit} of one layer it runs the rest uncompiled: give --packing true or --pad_to_multiple_of 64"
            )
        return {"graphs": count}
