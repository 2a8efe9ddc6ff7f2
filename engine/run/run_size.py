"""Sizes of a run for the plan: parameters, memory of a device, disk; a warning if the disk has less.

Tests: tests/engine/config/test_dry_run.py, tests/engine/run/test_memory.py.
"""

import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from engine.config.errors import warn
from engine.config.run_config import RunConfig
from engine.models.base_model import tensors_of_base
from engine.run import memory
from engine.run.model_with_loss import ModelWithLoss
from engine.run.techniques import Techniques

MANY_GROUPS = 6
SAVED = ("checkpoints", "final")  # folders of a run


def size_rows(
    cfg: RunConfig, model: ModelWithLoss, optimizer: Any, techniques: Techniques, total: int, longest: int = 0
) -> dict[str, str]:
    """Return the rows of the plan of a run of `total` steps that say how large it is. Warn if the disk is too small.

    `longest`: tokens of the longest row, 0 if unknown."""
    parameters, trainable = memory.count_parameters(model.model)
    checkpoint = _checkpoint_bytes(cfg, model, trainable, techniques.copies)
    disk = _disk_bytes(cfg, checkpoint, _final_bytes(cfg, model), total)
    _warn_of_full_disk(Path(cfg.output_dir), disk)
    return {
        "parameters": f"{parameters:,} ({trainable:,} trainable) in {cfg.dtype}",
        "parameter groups": describe_groups(optimizer.param_groups, cfg.learning_rate),
        "memory": memory.describe_memory(cfg, model.model, _size, techniques.copies_in_step, longest),
        "disk": f"{_size(disk)} for checkpoints and the final model in {cfg.output_dir}",
    }


def describe_groups(groups: list[dict], learning_rate: float) -> str:
    """Return what share of the trained parameters has which rate, before the schedule, and which weight decay.

    Of many groups, as with lr_layer_decay, only the lowest and the highest rate are named."""
    sizes: Counter = Counter()
    for group in groups:
        rate = f"rate {learning_rate * group.get('lr_factor', 1.0):.2e}, weight decay {group.get('weight_decay', 0):g}"
        sizes[rate] += sum(parameter.numel() for parameter in group["params"])
    texts = [f"{size / max(1, sizes.total()):.1%}: {rate}" for rate, size in sizes.items()]
    if len(texts) > MANY_GROUPS:
        rates = sorted(learning_rate * group.get("lr_factor", 1.0) for group in groups)
        texts = [f"{len(texts)} with rates of {rates[0]:.2e} to {rates[-1]:.2e}"]
    return "; ".join(texts)


def _warn_of_full_disk(folder: Path, needed: int) -> None:
    """Warn if the disk of the run folder has less space than `needed`, with the checkpoints that are there already."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    for name in SAVED:
        free += sum(file.stat().st_size for file in (folder / name).rglob("*") if file.is_file())
    if free < needed:
        warn(
            f"output_dir: {folder} needs {needed:,} bytes for checkpoints and the final model, but {free:,} bytes are "
            "free: free disk space, lower --save_total_limit, or give another --output_dir"
        )


def _checkpoint_bytes(cfg: RunConfig, model: ModelWithLoss, trainable: int, copies: int) -> int:
    """Return the size of a checkpoint: weights, unless they are of a base model, optimizer state, `copies` of techniques."""
    saved = model.task.saved(model.model)  # without a frozen teacher
    weights, trained = memory.count_bytes(saved)
    parameters = dict(saved.named_parameters())
    left_out = tensors_of_base(model.task, saved, parameters)
    weights -= sum(parameters[name].nbytes for name in left_out)
    width = getattr(torch, cfg.dtype).itemsize
    return weights + memory.moment_bytes(cfg, trainable, trained) + copies * max(width, 4) * trainable


def _final_bytes(cfg: RunConfig, model: ModelWithLoss) -> int:
    """Return the size of final/: the model, and what add-ons have trained of a base model that checkpoints leave out."""
    saved = model.task.saved(model.model)
    weights, trained = memory.count_bytes(saved)
    if memory.bytes_of_scales(saved):  # a base in few bits is merged in 16
        weights = 2 * memory.count_parameters(saved)[0]
    return weights if all(addon.writes_base() for addon in cfg.addons) else trained


def _disk_bytes(cfg: RunConfig, checkpoint: int, final: int, total: int) -> int:
    """Return the peak size of checkpoints/ and final/ during the run, in bytes; `checkpoint` and `final`: of one."""
    # Old checkpoints are deleted after the next one is written, and the best and every Nth are kept besides the newest.
    kept = cfg.save_total_limit + 1
    if cfg.metric_for_best_model:
        kept += 1
    if cfg.save_keep_every:
        kept += total // math.lcm(cfg.save_steps, cfg.save_keep_every)
    written = math.ceil(total / cfg.save_steps)  # also at the end
    return checkpoint * min(kept, written) + final


def _size(count: float) -> str:
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, max(0, int(math.log2(max(count, 1)) // 10)))
    return f"{count / 1024**power:.3g} {units[power]}"
