"""Smoke test of a run (`--smoke`): the task's checks, two steps, a save, a resume into a fresh model, compared.

First the task alone is checked on a few rows (task_checks.py). Then both passes are the `train` of train.py, with the
fields of the run, in OUTPUT_DIR/.smoke; nothing else of the run folder is read or written. Tests: tests/training/test_smoke.py.
"""

import copy
import gc
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from src.config.errors import Failure, UsageError, warn
from src.config.schema import RunConfig
from src.distributed.host_group import run_on_main
from src.runtime import console
from src.runtime.exit_codes import is_out_of_memory
from src.storage.jsonl import strict_json
from src.tasks import Task
from src.training.evaluation import evaluate
from src.training.task_checks import check_collate, check_loss
from src.training.techniques import Techniques
from src.training.train_state import Run

ROUNDS = 2  # micro-batches per process in the evaluation
ROWS = 4  # of each split, for the checks of the task
TOLERANCE = 0.1  # of a sum in low precision; a mean is off by one half


class Snapshot(NamedTuple):
    """The state at the end of a pass, the same on every rank."""

    resumed: bool  # whether the pass began from a checkpoint
    values: dict[str, str]  # name of a tensor, number or metric -> hash or value


def run(train: Callable[..., Any], cfg: RunConfig, task: Task, datasets: dict, accelerator: Any) -> None:
    """Check the task, then run `train` twice, the second time from the checkpoint of the first; a collective.

    Raise Failure on every rank for a mistake of the task, and UsageError if the second pass does not end with the state
    of the first, bit by bit."""
    run_on_main(accelerator, lambda: check_task(task, datasets, accelerator))
    folder = Path(cfg.output_dir) / ".smoke"
    rows = ROUNDS * cfg.per_device_eval_batch_size * accelerator.num_processes
    rows = min(cfg.max_eval_examples or rows, rows)

    def run_pass(resume: str) -> Snapshot:
        fresh = copy.copy(task)  # `build` sets attributes
        fresh.cfg = replace(cfg, resume=resume, output_dir=str(folder), max_eval_examples=rows, report_to=[])
        state = train(fresh.cfg, fresh, datasets, accelerator)
        accelerator.free_memory()
        gc.collect()
        return state

    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
    accelerator.wait_for_everyone()
    old = run_pass("never").values
    resumed, new = run_pass("auto")
    if not resumed:
        raise Failure(f"smoke: there is no checkpoint in {folder} to resume from: see the warnings above")
    differ = [
        f"{n}: {old.get(n, 'absent')} → {new.get(n, 'absent')}" for n in sorted(old | new) if old.get(n) != new.get(n)
    ]
    if differ:
        raise UsageError(
            f"smoke: a resumed run differs from the run that it continues in {len(differ)} values: {'; '.join(differ[:3])}. "
            "`build(weights)` of the task must return the model that was saved (from_pretrained drops a parameter or buffer "
            "that the model class does not have), and an evaluation must give the same numbers twice"
        )
    if accelerator.is_main_process:
        for name in ("checkpoints", "final"):
            shutil.rmtree(folder / name, ignore_errors=True)
        console.say(
            f"\n{len(old)} tensors, numbers and metrics (of {rows} rows: {ROUNDS} micro-batches a process) are equal after a "
            "resume, bit by bit\nsmoke: passed"
        )


def check_task(task: Task, datasets: dict, accelerator: Any) -> None:
    """Raise Failure if `collate` or `loss` of the task makes one of the mistakes of task_checks.py.

    `loss` is called without the backend, by this process alone, on its device."""
    rows = {name: rows_of(split) for name, split in datasets.items() if hasattr(split, "rows")}
    if "train" not in rows:
        warn("smoke: rows of a stream are not checked before the two steps")
    for name in rows:
        check_collate(task, rows[name], training=name == "train")
    if str(accelerator.distributed_type).endswith("DEEPSPEED"):
        return warn("smoke: `loss` is not checked under DeepSpeed: run make smoke on one process, too")
    fresh = copy.copy(task)
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


def is_exact(cfg: RunConfig, accelerator: Any) -> bool:
    """Return whether a run computes in float32 or better."""
    return accelerator.mixed_precision == "no" and cfg.dtype != "bfloat16" and not cfg.tf32


def rows_of(split: Any) -> list[dict]:
    """Return the first rows of each source of a split, ROWS in all, or one of each."""
    sources = split.segments()
    each = max(1, ROWS // len(sources))
    return [row for _, _, part in sources for row in part.rows(np.arange(min(len(part), each)))]


def snapshot(run: Run, start: Any, checkpointer: Any, techniques: Techniques, score: Callable) -> Snapshot:
    """Return the state and the metrics of a run that ends; in the first pass, warn if rows depend on each other.

    `start` is where it began, `score()` evaluates the weights that the model has."""
    resumed, cfg, values = start.checkpoint is not None, run.cfg, checkpointer.state_hashes()
    val_set = run.datasets.get("validation")
    metrics = techniques.evaluate(score(), score) if val_set else None
    values |= {f"evaluation/{name}": json.dumps(strict_json(value)) for name, value in (metrics or {}).items()}
    if metrics and metrics["weight"] and not resumed:
        by_row = replace(cfg, per_device_eval_batch_size=1)
        single, loss = evaluate(run.backend, run.module, run.task, val_set, by_row)["loss"], metrics["loss"]
        tolerance = 1e-4 if is_exact(cfg, run.backend.accelerator) else 1e-2
        if abs(single - loss) > tolerance * abs(loss):
            warn(
                f"smoke: the loss of the validation rows is {loss:.6g} in micro-batches of {cfg.per_device_eval_batch_size}, "
                f"but {single:.6g} one by one: it depends on the padding or on the rows beside a row, so results will depend "
                "on per_device_batch_size"
            )
    return Snapshot(resumed, values)
