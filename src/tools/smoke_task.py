"""The checks of a task before its first step: smoke.py launches them as it launches train.py, with the flags of the run.

Tests: tests/tools/test_smoke.py.
"""

import copy
import gc
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from src.checkpointing.locate_weights import init_weights
from src.config import parsing, validation
from src.config.errors import Failure, UsageError, warn
from src.config.schema import RunConfig
from src.data import dataset
from src.distributed import backends, stop_signals
from src.distributed.host_group import run_on_main
from src.distributed.init_accelerator import check_environment, init_accelerator, shutdown
from src.runtime.exit_codes import is_out_of_memory, run_main
from src.storage.jsonl import strict_json
from src.tasks import OPTIONS, Task, make_task
from src.training.evaluation import evaluate
from src.training.model_with_loss import ModelWithLoss
from src.training.schedules import total_steps
from src.training.task_checks import check_collate, check_loss, place
from src.training.training_model import choose_kernels

STEPS = 3  # of each run of smoke.py; the second one resumes at the step before the last
ROWS = 4  # of each split, for `collate` and `loss`
TOLERANCE = 0.1  # of a sum in low precision; a mean is off by one half


def main(argv: list[str]) -> None:
    stop_signals.exit_on_signal()
    cfg, options = parsing.parse(argv, OPTIONS)
    validation.check(cfg, options)
    check_environment()
    task = make_task(cfg, options)
    datasets = dataset.prepare_datasets(cfg, task)
    num_steps = total_steps(cfg, datasets["train"].stats["examples"])
    if num_steps <= STEPS:
        raise UsageError(
            f"max_steps: a smoke test trains {STEPS} steps of a longer run, but this run has only {num_steps}: give more "
            "steps, or run it as it is"
        )
    accelerator = init_accelerator(cfg)
    run_on_main(accelerator, lambda: check_task(task, datasets, accelerator))
    if "validation" in datasets:
        check_evaluation(cfg, task, datasets["validation"], accelerator)
    shutdown(accelerator)


def check_task(task: Task, datasets: dict, accelerator: Any) -> None:
    """Raise Failure if `collate` or `loss` of the task makes one of the mistakes of task_checks.py.

    `loss` is called without the backend, by this process alone, on its device."""
    rows = {name: rows_of(split) for name, split in datasets.items() if hasattr(split, "rows")}
    if "train" not in rows:
        warn("smoke: rows of a stream are not checked before the first step")
    for name in rows:
        check_collate(task, rows[name], training=name == "train")
    if str(accelerator.distributed_type).endswith("DEEPSPEED"):
        return warn("smoke: `loss` is not checked under DeepSpeed: run make smoke on one process, too")
    fresh = copy.copy(task)  # `build` sets attributes
    rounding = 1e-6 if is_exact(task.cfg, accelerator) else 1e-2
    try:
        model = fresh.build_model(None).to(accelerator.device)
        for name in rows:
            check_loss(fresh, model, rows[name], name == "train", TOLERANCE, rounding, accelerator.autocast)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        warn("smoke: `loss` is not checked, because the whole model does not fit in the memory of one device")
    finally:
        model = None
        gc.collect()
        if accelerator.device.type == "cuda":
            torch.cuda.empty_cache()


def check_evaluation(cfg: RunConfig, task: Task, split: Any, accelerator: Any) -> None:
    """Raise Failure if an evaluation of the first weights gives other numbers when it is repeated. Warn if its loss
    depends on the rows beside a row. A collective."""
    backend = backends.make_backend(accelerator, cfg)
    weights = run_on_main(accelerator, lambda: init_weights(cfg, task))
    choose_kernels(cfg, task, split, accelerator.device)
    module = backend.prepare_for_evaluation(ModelWithLoss(backend.build_model(task, weights), task))
    first, again = (strict_json(evaluate(backend, module, task, split, cfg)) for _ in range(2))
    differ = [f"{name}: {first[name]} → {again[name]}" for name in first if first[name] != again.get(name)]
    if differ:
        raise Failure(
            f"{place(task)}: an evaluation of the same rows and weights gives other numbers when it is repeated: "
            f"{'; '.join(differ[:3])}. Draw nothing at random in `metrics`, and in `loss` only from seeded generators"
        )
    if not first["weight"]:
        return
    single = evaluate(backend, module, task, split, replace(cfg, per_device_eval_batch_size=1))["loss"]
    tolerance = 1e-4 if is_exact(cfg, accelerator) else 1e-2
    if abs(single - first["loss"]) > tolerance * abs(first["loss"]):
        warn(
            f"smoke: the loss of the validation rows is {first['loss']:.6g} in micro-batches of "
            f"{cfg.per_device_eval_batch_size}, but {single:.6g} one by one: it depends on the padding or on the rows beside "
            "a row, so results will depend on per_device_batch_size"
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
