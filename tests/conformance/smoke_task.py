"""The checks of a task before its first step: `make smoke` launches them like train.py, with the flags of the run.

Tests: tests/engine/tools/test_smoke.py.
"""

import copy
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engine.config import parsing, validation
from engine.config.errors import UsageError, warn
from engine.config.run_config import RunConfig
from engine.distributed import stop_signals
from engine.distributed.host_group import run_on_main
from engine.distributed.init_accelerator import check_environment, init_accelerator, shutdown
from engine.find_tasks import OPTIONS, Task, make_task
from engine.plan import dataset
from engine.plan.batch_plan import sizes_of_run
from engine.process.exit_codes import is_out_of_memory, run_main
from engine.tools.smoke import STEPS
from tests.conformance.smoke_checks import check_collate, check_loss, check_weight, measure_by, varied_ids

ROWS = 4  # of each split, for `collate` and `loss`
TOLERANCE = 0.1  # of a sum in low precision; a mean is off by one half


def main(argv: list[str]) -> None:
    """Check the task with the flags of a run, on the backend of its launch. Raise Failure for a mistake of the task."""
    stop_signals.exit_on_signal()
    cfg, options = parsing.parse(argv, OPTIONS)
    validation.check(cfg, options)
    check_environment()
    task = make_task(cfg, options)
    datasets = dataset.prepare_datasets(cfg, task)
    num_steps = cfg.max_steps
    if not num_steps:
        sizes = sizes_of_run(cfg, datasets["train"].stats["examples"])
        num_steps = sizes.steps_of(cfg.num_train_epochs)
    if num_steps <= STEPS:
        more = "a larger --max_steps" if cfg.max_steps else "a smaller --global_batch_size or more rows for more steps"
        raise UsageError(
            f"max_steps: a smoke test trains {STEPS} steps of a longer run, but this run has only {num_steps}: give {more}, "
            "or run it as it is"
        )
    accelerator = init_accelerator(cfg)
    run_on_main(accelerator, lambda: check_task(task, datasets, accelerator))
    shutdown(accelerator)


def check_task(task: Task, datasets: dict, accelerator: Any) -> None:
    """Raise Failure if `collate` or `loss` of the task makes one of the mistakes of smoke_checks.py.

    `loss` is called without the backend, by this process alone, on its device."""
    rows = {name: rows_of(split) for name, split in datasets.items() if hasattr(split, "rows")}
    if "train" not in rows:
        warn("smoke: rows of a stream are not checked before the first step")
    for name in rows:
        check_collate(task, rows[name], training=name == "train")
        for _, _, part in datasets[name].segments():
            check_weight(task, part)
    if str(accelerator.distributed_type).endswith("DEEPSPEED"):
        return warn("smoke: `loss` is not checked under DeepSpeed: run make smoke on one process, too")
    fresh = copy.copy(task)  # `build` sets attributes
    rounding = 1e-6 if is_exact(task.cfg, accelerator) else 1e-2
    try:
        model = fresh.build_model(None).to(accelerator.device)
        for name in rows:
            check_loss(fresh, model, rows[name], name == "train", TOLERANCE, rounding, accelerator.autocast)
        if "validation" in rows and not hasattr(task, "sums_by_block"):  # there it is one loss over many rows
            measure = measure_by(fresh, model, False, accelerator.autocast)
            for _, _, part in datasets["validation"].segments():
                warn_of_neighbors(measure, part.rows(varied_ids(part)), max(1e-4, rounding))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        warn("smoke: `loss` is not checked, because the whole model does not fit in the memory of one device")
    finally:
        model = None
        gc.collect()
        if accelerator.device.type == "cuda":
            torch.cuda.empty_cache()


def warn_of_neighbors(measure: Callable, rows: list[dict], tolerance: float) -> None:
    """Warn if the loss of validation rows depends on the rows beside a row. That it is the same when it is computed again,
    smoke.py finds by the resume."""
    together, *alone = [measure(each, 1).result.get("loss", 0.0) for each in (rows, *([row] for row in rows))]
    if abs(sum(alone) - together) > tolerance * abs(together):
        warn(
            f"smoke: the loss of {len(rows)} validation rows is {together:.6g} in one micro-batch, but {sum(alone):.6g} one by "
            "one: it depends on the padding or on the rows beside a row, so results will depend on per_device_batch_size"
        )


def is_exact(cfg: RunConfig, accelerator: Any) -> bool:
    """Return whether a run computes in float32 or better."""
    return accelerator.mixed_precision == "no" and cfg.dtype != "bfloat16" and not cfg.tf32


def rows_of(split: Any) -> list[dict]:
    """Return the first rows of each source of a split, ROWS in all, or one of each."""
    sources = split.segments()
    each = max(1, ROWS // len(sources))
    return [row for _, _, part in sources for row in part.rows(np.arange(min(len(part), each)))]


if __name__ == "__main__":
    run_main(main)
