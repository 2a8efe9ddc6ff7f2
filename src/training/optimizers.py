"""Parameter groups, optimizers, and the learning rate as a function of completed updates.

A fork adds an optimizer as one line of make_optimizer. Tests: tests/training/test_optimizers.py.
"""

import math
from collections.abc import Callable

import torch

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.data.batch_plan import steps_per_epoch
from src.distributed.tensor_parallel import apart


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Return the trainable parameters in two groups: decay on those of two dimensions or more, none on the rest."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [part for group in groups for part in apart(group)]


def make_optimizer(run: RunConfig, model: torch.nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    """Return the optimizer that `run.optim` names; `fused` updates all parameters by one kernel."""
    groups = parameter_groups(model, run.weight_decay)
    if not groups:
        raise UsageError("no parameter of the model is trainable")
    options = {"lr": run.learning_rate, "fused": fused}
    if run.optim == "sgd":
        return torch.optim.SGD(groups, momentum=run.adam_beta1, **options)
    return torch.optim.AdamW(groups, betas=(run.adam_beta1, run.adam_beta2), eps=run.adam_epsilon, **options)


def warmup_updates(run: RunConfig, total: int) -> int:
    """Return the updates of warmup in a run of `total` updates: at most all of them, as in a short trial."""
    return min(total, round(run.warmup_steps * total) if run.warmup_steps < 1 else int(run.warmup_steps))


def make_schedule(run: RunConfig, total: int) -> Callable[[int], float]:
    """Return completed updates -> learning rate, by transformers' schedule of the same name over `total` updates."""
    from transformers import get_scheduler

    warmup = warmup_updates(run, total)
    base = torch.optim.SGD([torch.zeros(1)], lr=run.learning_rate)
    kwargs = dict(run.lr_scheduler_kwargs or {})
    if run.lr_scheduler_type == "warmup_stable_decay":
        kwargs.setdefault("num_decay_steps", total // 5)
    try:
        scheduler = get_scheduler(
            run.lr_scheduler_type,
            base,
            num_warmup_steps=warmup,
            num_training_steps=total,
            scheduler_specific_kwargs=kwargs,
        )
        factor = scheduler.lr_lambdas[0]
        if not all(math.isfinite(factor(update)) for update in (0, total // 2, total - 1)):
            raise ValueError("a learning rate would not be finite")
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise UsageError(f"lr_scheduler_kwargs: {run.lr_scheduler_type} does not take {kwargs}: {error}") from error
    return lambda updates: run.learning_rate * factor(updates)


def total_steps(run: RunConfig, examples: int) -> int:
    """Return the optimizer steps of the whole run."""
    return run.max_steps or math.ceil(round(run.num_train_epochs * steps_per_epoch(examples, run.global_batch_size), 6))
