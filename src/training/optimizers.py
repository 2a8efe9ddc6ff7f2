"""Optimizers and their parameter groups.

Add an optimizer as one line of make_optimizer. Tests: tests/training/test_optimizers.py.
"""

import torch

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.distributed.tensor_parallel import split_by_sharding


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Return the trainable parameters in groups: weight decay for two or more dimensions, none for the rest."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [part for group in groups for part in split_by_sharding(group)]


def make_optimizer(cfg: RunConfig, model: torch.nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    """Return the optimizer named by `cfg.optim`; with `fused`, one kernel updates all parameters."""
    groups = parameter_groups(model, cfg.weight_decay)
    if not groups:
        raise UsageError("no parameter of the model is trainable: requires_grad is False for all of them")
    options = {"lr": cfg.learning_rate, "fused": fused}
    if cfg.optim == "sgd":
        return torch.optim.SGD(groups, momentum=cfg.adam_beta1, **options)
    return torch.optim.AdamW(groups, betas=(cfg.adam_beta1, cfg.adam_beta2), eps=cfg.adam_epsilon, **options)
