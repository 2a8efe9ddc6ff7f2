"""Trial loss before step 1: the evaluation loss of two training rows, together and one by one.

Tests: tests/training/test_trial_loss.py.
"""

import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from src.config.errors import UsageError, warn
from src.config.schema import RunConfig
from src.data.data_loader import seed_everything
from src.data.step_sizes import sizes_of_run
from src.models.model_files import reason
from src.models.parameter_checks import check_parameters
from src.tasks import Task
from src.training.schedules import total_steps

LIMIT = 1e12  # parameters × tokens: more would take a CPU longer than a few seconds
BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
TOLERANCE = 1e-4  # some layers compute in float32, also in a float64 model


def check_trial_loss(model: torch.nn.Module, task: Task, train_set: Any) -> None:
    """Raise UsageError if the loss of two short training rows cannot be computed; warn if the rows are not independent.

    The model is on the CPU, and stays as it is: it runs in evaluation mode, without gradients."""
    check_parameters(model)
    if not (segments := train_set.segments()):  # a stream has no rows before the first step
        return
    _, _, part = segments[0]
    lengths = np.asarray(part.lengths[:1000], np.int64)
    shortest = np.argsort(lengths, kind="stable")
    longer = shortest[lengths[shortest] > lengths[shortest[0]]]  # beside it, the shortest row has padding
    ids = [int(shortest[0]), *(longer if len(longer) else shortest[1:])[:1].tolist()]
    if sum(p.numel() for p in model.parameters()) * 2 * lengths[ids].sum() > LIMIT:
        return
    rows = part.rows(np.array(ids))
    if has_micro_batch_of_one_row(task.cfg, len(train_set)):
        _check_one_row(model, task, rows[:1])
    with _evaluation(model):
        together = _sums(model, task, rows, ids)
        alone = [_sums(model, task, [row], [id]) for row, id in zip(rows, ids, strict=True)]
    if task.has_batch_loss or task.cfg.dtype == "bfloat16":
        return
    loss, one_by_one = (float(value) for value in (together["loss"], sum(sums["loss"] for sums in alone)))
    if not np.isfinite(loss):
        warn(f"the loss of training rows {ids} is {loss} before the first step")
    elif abs(loss - one_by_one) > TOLERANCE * abs(loss):
        warn(
            f"the loss of training rows {ids} is {loss:.6g} in one micro-batch, but {one_by_one:.6g} one by one: it depends "
            "on the padding or on the rows beside a row, so results will depend on per_device_batch_size"
        )


def has_micro_batch_of_one_row(cfg: RunConfig, examples: int) -> bool:
    """Return whether a step, also the shorter last one of an epoch, has a micro-batch of one row."""
    size = cfg.per_device_batch_size
    if size == "auto" or cfg.per_device_batch_tokens:  # not known before the first step
        return False
    sizes = sizes_of_run(cfg, examples).batch_sizes(total_steps(cfg, examples))
    return any(rows % size == 1 or size == 1 for rows in sizes)


def _check_one_row(model: torch.nn.Module, task: Task, rows: list[dict]) -> None:
    """Raise UsageError if batch norm cannot train on one row; restore its running statistics."""
    if not any(isinstance(module, BATCH_NORMS) for module in model.modules()):
        return
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    seed_everything(0)
    try:
        with torch.no_grad():
            model.train()
            call = task.represent if task.has_batch_loss else task.loss
            call(model, task.collate(rows, training=True).inputs)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise UsageError(
            "per_device_batch_size: a micro-batch has one row (global_batch_size, or the examples in the last step of an "
            "epoch, modulo per_device_batch_size is 1), and batch norm cannot train on one row: give another "
            "per_device_batch_size or global_batch_size"
        ) from error
    finally:
        for name, value in model.named_buffers():
            value.copy_(buffers[name])


def _sums(model: torch.nn.Module, task: Task, rows: list[dict], ids: list[int]) -> dict[str, torch.Tensor]:
    """Return what the task returns for `rows`; raise UsageError if it fails or returns something else than sums."""
    seed_everything(0)
    call = task.represent if task.has_batch_loss else task.loss
    try:
        sums = call(model, task.collate(rows, training=False).inputs)
    except UsageError:
        raise
    except Exception as error:
        where = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename][-1]
        raise UsageError(
            f"task {task.cfg.task}: the loss of training rows {ids} cannot be computed by {type(model).__name__}: "
            f"{type(error).__name__}: {reason(error)} ({Path(where.filename).name}, line {where.lineno}, in {where.name}). "
            "Task, model and data do not fit together"
        ) from error
    if not task.has_batch_loss and "loss" not in sums:
        raise UsageError(f"task {task.cfg.task}: `loss` returned {', '.join(sums) or 'nothing'}, but no sum named loss")
    for name, value in sums.items():
        if not torch.is_tensor(value) or (value.dim() and len(value) != len(rows)) or (name == "loss" and value.dim()):
            kind = f"a tensor of shape {list(value.shape)}" if torch.is_tensor(value) else f"a {type(value).__name__}"
            raise UsageError(
                f"task {task.cfg.task}: {name} is {kind} for {len(rows)} rows: return a sum (a tensor without dimensions) "
                "or a tensor with one entry per row"
            )
    return sums


@contextmanager
def _evaluation(model: torch.nn.Module):
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
