"""Parameter groups, optimizers, and the learning rate as a function of completed updates.

A fork adds an optimizer as one line of make_optimizer. Tests: tests/training/test_optimizers.py.
"""

import math
from collections.abc import Callable

import torch

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.data.batch_plan import steps_per_epoch
from src.distributed.tensor_parallel import split_by_sharding


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Return the trainable parameters in two groups: decay on those of two dimensions or more, none on the rest."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [part for group in groups for part in split_by_sharding(group)]


def make_optimizer(cfg: RunConfig, model: torch.nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    """Return the optimizer that `cfg.optim` names; a `fused` one updates all parameters in one kernel."""
    groups = parameter_groups(model, cfg.weight_decay)
    if not groups:
        raise UsageError("no parameter of the model is trainable")
    options = {"lr": cfg.learning_rate, "fused": fused}
    if cfg.optim == "sgd":
        return torch.optim.SGD(groups, momentum=cfg.adam_beta1, **options)
    return torch.optim.AdamW(groups, betas=(cfg.adam_beta1, cfg.adam_beta2), eps=cfg.adam_epsilon, **options)


def warmup_updates(cfg: RunConfig, total: int) -> int:
    """Return the updates of warmup in a run of `total` updates: at most all of them, as in a short trial."""
    return min(total, round(cfg.warmup_steps * total) if cfg.warmup_steps < 1 else int(cfg.warmup_steps))


def make_schedule(cfg: RunConfig, total: int) -> Callable[[int], float]:
    """Return completed updates -> learning rate, by transformers' schedule of the same name over `total` updates."""
    from transformers import get_scheduler

    warmup = warmup_updates(cfg, total)
    base = torch.optim.SGD([torch.zeros(1)], lr=cfg.learning_rate)
    kwargs = dict(cfg.lr_scheduler_kwargs or {})
    if cfg.lr_scheduler_type == "warmup_stable_decay":
        kwargs.setdefault("num_decay_steps", total // 5)
    try:
        scheduler = get_scheduler(
            cfg.lr_scheduler_type,
            base,
            num_warmup_steps=warmup,
            num_training_steps=total,
            scheduler_specific_kwargs=kwargs,
        )
        factor = scheduler.lr_lambdas[0]
        if not all(math.isfinite(factor(update)) for update in (0, total // 2, total - 1)):
            raise ValueError("a learning rate would not be finite")
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise UsageError(f"lr_scheduler_kwargs: {cfg.lr_scheduler_type} does not take {kwargs}: {error}") from error
    return lambda updates: cfg.learning_rate * factor(updates)


def total_steps(cfg: RunConfig, examples: int) -> int:
    """Return the optimizer steps of the whole run."""
    return cfg.max_steps or math.ceil(round(cfg.num_train_epochs * steps_per_epoch(examples, cfg.global_batch_size), 6))
