"""Evaluation: every example exactly once, with bitwise the same result on any number of processes.

Tests: tests/src/training/test_evaluation.py and tests/conformance/.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.config.errors import UsageError
from engine.data.batch_plan import MicroBatch, evaluation_order
from engine.data.data_loader import read_batches
from engine.data.seeding import seed_everything
from engine.distributed.backends import Backend
from engine.distributed.host_group import run_on_main
from engine.distributed.stop_signals import StopSignals
from engine.process import console
from engine.task import Batch, Task
from src.fields import RunConfig
from src.training.training_model import has_few_shapes

ASK = 8  # micro-batches between two all-reduces of the stop requests; then their results are copied to the host


@torch.no_grad()
def evaluate(
    backend: Backend,
    module: torch.nn.Module,
    task: Task,
    split,
    cfg: RunConfig,
    signals: StopSignals | None = None,
) -> dict | None:
    """Return loss (sum of losses / sum of weights), weight, examples and the task's metrics, the same on every rank.

    Return None if `signals` ask any rank to stop. The result is bitwise the same for any number of processes on
    one kind of device, because the micro-batches, their sums and the order of adding these do not depend on that
    number. Memory: a few numbers per micro-batch.
    """
    plan, accelerator = make_plan(split, cfg, task), backend.accelerator
    rounds = -(-len(plan.micro_batches) // backend.data_world_size)
    mine = share_of_rank(backend, plan.micro_batches, rounds)
    results: list[tuple[MicroBatch, dict[str, np.ndarray]]] = []
    # Without DDP's wrapper a forward pass is not a collective, so ranks may run different numbers of them.
    module = accelerator.unwrap_model(module)

    def forward(micro: MicroBatch, batch: Batch) -> tuple[MicroBatch, Batch, dict[str, torch.Tensor]]:
        seed_everything(micro.seed)
        return micro, batch, module({k: v.to(accelerator.device, non_blocking=True) for k, v in batch.inputs.items()})

    progress = console.Progress("evaluation", len(mine), "batches", accelerator.is_main_process)
    with _evaluating(module, cfg, has_few_shapes(cfg, task, split)), _one_thread(accelerator.device):
        batches = iter(read_batches(split, task, iter(mine), cfg, accelerator.device.type == "cuda", training=False))
        for _ in range(0, rounds, ASK):
            if signals is not None:
                signals.look()
                if backend.hosts.sum([signals.stopping()])[0]:
                    return None
            outputs = [forward(*item) for item in islice(batches, ASK)]
            results += [(micro, _on_host(batch, out)) for micro, batch, out in outputs if not micro.dummy]
            progress.update(len(outputs))
    return _combine(backend, task, plan, results)


def share_of_rank(backend: Backend, micro_batches: list[MicroBatch], rounds: int) -> list[MicroBatch]:
    """Return the micro-batches of this rank; a sharded model gets dummies, because each pass is a collective."""
    mine = micro_batches[backend.data_rank :: backend.data_world_size]
    return mine + [replace(micro_batches[0], dummy=True)] * (rounds - len(mine)) * backend.is_sharded


# ---- the plan --------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Consecutive examples of an evaluation: a source of a mixture, or a global batch of a loss over whole batches."""

    name: str  # of the source; empty without a mixture
    rows: slice
    micro_batches: slice


class Plan(NamedTuple):
    """All micro-batches of an evaluation; they do not depend on the number of processes."""

    micro_batches: list[MicroBatch]
    first_row: list[int]  # by micro-batch: an example's id minus this is its row among all evaluated examples
    sources: list[Part]
    blocks: list[Part]  # of `global_batch_size` rows, for a task with `sums_by_block`; micro-batches never cross them


def make_plan(split, cfg: RunConfig, task: Task) -> Plan:
    """Return the plan of an evaluation of at most `cfg.max_eval_examples` rows of each source of `split`."""
    plan, micro, begin = Plan([], [], [], []), cfg.per_device_eval_batch_size, 0
    size = cfg.global_batch_size if hasattr(task, "sums_by_block") else None
    for name, first_id, part in split.segments():
        count, first = min(len(part), cfg.max_eval_examples or len(part)), len(plan.micro_batches)
        for each in evaluation_order(count, micro, cfg.seed, part.lengths, size):
            plan.micro_batches.append(replace(each, ids=each.ids + first_id, index=len(plan.micro_batches)))
            plan.first_row.append(first_id - begin)
        plan.sources.append(Part(name, slice(begin, begin + count), slice(first, len(plan.micro_batches))))
        for start in range(begin, begin + count, size or count):
            stop = min(start + (size or count), begin + count)
            after = first - (start - stop) // micro
            plan.blocks.append(Part(name, slice(start, stop), slice(first, after)))
            first = after
        begin += count
    return plan


# ---- results ---------------------------------------------------------------------------------------------------------


def _on_host(batch: Batch, out: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return what a micro-batch adds to the evaluation, in float64 or int64; this waits for the device.

    A value without dimensions is a sum, any other holds one value or vector for each row. All are copies: a view of a
    batch would keep its file of a dataloader worker open, or its memory."""
    dtypes = {name: torch.float64 if value.is_floating_point() else torch.int64 for name, value in out.items()}
    sums = {name: np.asarray(value, np.float64) for name, value in (batch.sums | {"weight": batch.weight}).items()}
    return {name: value.cpu().to(dtypes[name], copy=True).numpy() for name, value in out.items()} | sums


def _signature(values: dict[str, np.ndarray]) -> str:
    """Return the names of sums and, with their dtype and width, of values by row: the same for all micro-batches."""
    rows = {name: [str(value.dtype), *value.shape[1:]] for name, value in values.items() if value.ndim}
    return json.dumps([sorted(values.keys() - rows.keys()), rows], sort_keys=True)


def _combine(backend: Backend, task: Task, plan: Plan, results: list[tuple[MicroBatch, dict[str, np.ndarray]]]) -> dict:
    """Return the eval line of metrics.jsonl from all ranks' results; for a mixture, also each source's metrics."""
    signature, *others = backend.hosts.union({_signature(values) for _, values in results})
    if others:  # a sum would be dropped, or a vector of length 1 be repeated
        raise UsageError(
            f"the task returns {signature} for some micro-batches of an evaluation, but {others[0]} for others: return "
            "the same names and widths for all rows, with the value 0 where there is nothing to count"
        )
    names, rows_of = json.loads(signature)
    examples = plan.sources[-1].rows.stop
    # Each entry is one rank's number, and zero on the others, so sums over ranks are exact.
    seen, table = np.zeros(examples), np.zeros((len(plan.micro_batches), len(names)))
    values = {name: np.zeros((examples, *shape)) for name, (_, *shape) in rows_of.items()}
    for micro, result in results:
        places = micro.ids - plan.first_row[micro.index]
        seen[places] += 1
        table[micro.index] = [result[name] for name in names]
        for name, column in values.items():
            column[places] = result[name]
    assert (backend.hosts.sum(seen) == 1).all(), "not every example was evaluated exactly once"
    table = backend.hosts.sum(table).numpy()
    values = {name: backend.hosts.sum(column).numpy().astype(rows_of[name][0]) for name, column in values.items()}
    if sums_by_block := getattr(task, "sums_by_block", None):  # a loss over a whole batch
        names, table = _on_main(backend, lambda: sums_by_block(names, table, values, plan.blocks))
    line = _divide(task, names, table, examples)
    if plan.sources[0].name:
        parts = {s.name: (table[s.micro_batches], s.rows.stop - s.rows.start) for s in plan.sources}
        by_source = {name: _divide(task, names, rows, count) for name, (rows, count) in parts.items()}
        with_targets = [numbers for numbers in by_source.values() if numbers["weight"]]
        # Drop a total that some source lacks: bits_per_byte, for example, is unknown for pretokenized rows.
        line = {key: value for key, value in line.items() if all(key in numbers for numbers in with_targets)}
        line |= {f"{name}/{key}": value for name, numbers in by_source.items() for key, value in numbers.items()}
    if values:
        line |= _on_main(backend, lambda: task.row_metrics(values))
    # JSON knows no number of numpy, which a task's metrics may be.
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in line.items()}


def _divide(task: Task, names: list[str], table: np.ndarray, examples: int) -> dict:
    """Return loss, weight, examples and the task's metrics from a table of sums by micro-batch."""
    total = dict(zip(names, np.cumsum(table, axis=0)[-1].tolist(), strict=True))  # cumsum adds in order, one by one
    weight = total.pop("weight")
    if not weight:  # rows without a target
        return {"loss": None, "weight": weight, "examples": examples}
    return {"loss": total["loss"] / weight, "weight": weight, "examples": examples} | task.metrics(total, weight)


def _on_main(backend: Backend, compute: Callable[[], Any]) -> Any:
    """Compute metrics on the main process and broadcast them: all ranks decide by them (best model, early stop)."""
    with _one_thread(torch.device("cpu")):
        return run_on_main(backend.accelerator, compute)


# ---- modes -----------------------------------------------------------------------------------------------------------


@contextmanager
def _evaluating(module: torch.nn.Module, cfg: RunConfig, few_shapes: bool) -> Iterator[None]:
    """Within, the module is in evaluation mode and computes as in eval.py, which therefore gets the same loss: attention
    is chosen by the rows that are evaluated (`few_shapes`), and compiled layers run uncompiled."""
    training, of_training = module.training, torch.backends.cuda.cudnn_sdp_enabled()
    module.eval()
    torch.backends.cuda.enable_cudnn_sdp(few_shapes)
    try:
        with torch.compiler.set_stance("force_eager") if cfg.compile else nullcontext():
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(of_training)
        module.train(training)


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Limit the CPU to one thread, because the last bits of a matrix product depend on the number of threads.

    The other cores are then idle. More processes (make eval NPROC=4) use them and give the same result."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
