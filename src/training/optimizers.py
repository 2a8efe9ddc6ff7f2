"""Optimizers by name: the one that `optim` names, with its parameter groups.

src/config/optimizer_class.py finds the class or the add-on, parameter_groups.py makes the groups.
Tests: tests/training/test_optimizers.py, tests/training/test_optimizer_names.py.
"""

import torch

from src.config.errors import UsageError
from src.config.optimizer_class import find_class, optimizer_addon, optimizer_arguments
from src.config.schema import RunConfig
from src.training.parameter_groups import freeze, parameter_groups

FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)  # these can skip an update on the device


def make_optimizer(cfg: RunConfig, model: torch.nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    """Freeze what `cfg.freeze` names; return the optimizer named by `cfg.optim` of the remaining parameters.

    With `fused`, one kernel updates all parameters, where torch has one that can skip an update on the device."""
    freeze(model, cfg)
    groups = parameter_groups(model, cfg)
    if not groups:
        raise UsageError("no parameter of the model is trainable: requires_grad is False for all of them")
    kind = find_class(cfg.optim)
    options = {"lr": cfg.learning_rate} | optimizer_arguments(cfg, kind)
    if kind in FUSED:
        options["fused"] = fused
    try:
        if addon := optimizer_addon(cfg.optim):
            return addon.make(cfg, kind, groups, options)
        return kind(groups, **options)
    except Exception as error:
        raise UsageError(
            f"optim is {cfg.optim}: {kind.__name__} refuses its arguments or parameters: {error}"
        ) from error
