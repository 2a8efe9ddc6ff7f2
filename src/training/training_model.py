"""The model that is trained: built, changed by techniques, compiled; kernels of matrix products and attention.

Tests: tests/src/test_step.py and tests/conformance/.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from engine.config.errors import warn
from engine.distributed.backends import Backend
from engine.models.compile_and_recompute import compile_and_recompute
from engine.run.model_with_loss import ModelWithLoss
from engine.task import Task
from src.fields import RunConfig


def build_model(
    cfg: RunConfig,
    backend: Backend,
    task: Task,
    train_set,
    weights: str | Path | None,
    change_model: Callable[[ModelWithLoss, RunConfig], None],
) -> ModelWithLoss:
    """Return the task's model and loss in one module, changed by `change_model`, then compiled and with activation
    checkpointing as `cfg` says."""
    choose_kernels(cfg, task, train_set, backend.accelerator.device)
    model = ModelWithLoss(backend.build_model(task, weights), task)
    change_model(model, cfg)
    is_packed = bool(getattr(task.options, "packing", False))
    one_width = task.unit == "tokens" and (is_packed or rows_of_one_length(train_set))
    compile_and_recompute(model.model, cfg, one_width)
    return model


def choose_kernels(cfg: RunConfig, task: Task, split, device: torch.device) -> None:
    """Choose the kernels of matrix products (TF32), and of attention over the rows of `split`, in this process."""
    if cfg.tf32:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
            torch.set_float32_matmul_precision("high")
        else:
            warn("tf32 is ignored: it needs an NVIDIA GPU of the Ampere generation or later")
    torch.backends.cuda.enable_cudnn_sdp(has_few_shapes(cfg, task, split))


def has_few_shapes(cfg: RunConfig, task: Task, split) -> bool:
    """Return whether micro-batches of `split` have few shapes, so that attention may be computed by cuDNN.

    On Hopper and Blackwell it is torch's first choice (2.11 and later), but makes a plan for each new shape: 0.12 s
    forward and backward on an H200, where torch's own kernels take 1 ms. These are for rows of many lengths."""
    if task.unit != "tokens" or cfg.pad_to_multiple_of:
        return True
    return bool(getattr(task.options, "packing", False)) or rows_of_one_length(split)


def rows_of_one_length(split) -> bool:
    """Return whether all rows have as many tokens; False for a stream, because its rows are not known."""
    stats = split.stats
    if not stats.get("examples"):
        return False
    return stats["tokens"] == stats["examples"] * stats["longest"]
