"""Evaluation: every example exactly once, with bitwise the same result on any number of processes.

Tests: tests/src/training/test_evaluation.py and tests/conformance/.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from engine.config.errors import UsageError
from engine.distributed.backends import Backend
from engine.distributed.stop_signals import StopSignals
from engine.plan.batch_plan import MicroBatch, evaluation_order
from engine.plan.data_loader import read_batches
from engine.plan.seeding import seed_everything
from engine.process import console
from engine.run.answers import answer_rows
from engine.task import Batch, Task
from src.fields import RunConfig
from src.training.training_model import has_few_shapes

# Micro-batches between two all-reduces of the stop requests. Their results are copied to the host together, because
# each copy waits for the device.
BATCHES_BETWEEN_VOTES = 8

Result = tuple[MicroBatch, dict[str, np.ndarray]]  # of one micro-batch: what `_on_host` returns


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
    accelerator = backend.accelerator
    device = accelerator.device
    plan = make_plan(split, cfg, task)
    rounds = -(-len(plan.micro_batches) // backend.data_world_size)  # rounded up
    mine = backend.share_of_rank(plan.micro_batches, rounds)
    # Without DDP's wrapper a forward pass is not a collective, so ranks may run different numbers of them.
    module = accelerator.unwrap_model(module)
    results: list[Result] = []
    progress = console.Progress("evaluation", len(mine), "batches", accelerator.is_main_process)
    with backend.evaluating(module, has_few_shapes(cfg, task, split)):
        batches = iter(read_batches(split, task, iter(mine), cfg, device.type == "cuda", training=False))
        for _ in range(0, rounds, BATCHES_BETWEEN_VOTES):
            if signals is not None and signals.any_rank_stops(backend.hosts):
                return None
            outputs = []
            for micro, batch in islice(batches, BATCHES_BETWEEN_VOTES):
                inputs = {name: value.to(device, non_blocking=True) for name, value in batch.inputs.items()}
                seed_everything(micro.seed)
                outputs.append((micro, batch, module(inputs)))
            for micro, batch, out in outputs:  # only now: a copy to the host waits for the device
                if not micro.dummy:
                    results.append((micro, _on_host(batch, out)))
            progress.update(len(outputs))
    line = _eval_line(backend, task, plan, results)
    answered = answer_rows(backend, module, task, cfg, signals)
    return None if answered is None else line | answered


# ---- the plan --------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Consecutive examples of an evaluation: a source of a mixture, or a global batch of a loss over whole batches."""

    name: str  # of the source; empty without a mixture
    rows: slice
    micro_batches: slice


class Plan(NamedTuple):
    """All micro-batches of an evaluation; they do not depend on the number of processes."""

    micro_batches: list[MicroBatch]
    id_offsets: list[int]  # by micro-batch: an example's id minus this is its row among all evaluated examples
    sources: list[Part]
    blocks: list[Part]  # of `global_batch_size` rows, for a task with `sums_by_block`; micro-batches never cross them

    @property
    def num_examples(self) -> int:
        """The number of examples of all sources."""
        return self.sources[-1].rows.stop


def make_plan(split, cfg: RunConfig, task: Task) -> Plan:
    """Return the plan of an evaluation of at most `cfg.max_eval_examples` rows of each source of `split`."""
    plan = Plan([], [], [], [])
    micro_batch_size = cfg.per_device_eval_batch_size
    block_size = cfg.global_batch_size if hasattr(task, "sums_by_block") else None
    first_row = 0  # of a source
    for name, first_id, part in split.segments():
        num_rows = min(len(part), cfg.max_eval_examples or len(part))
        first_micro_batch = len(plan.micro_batches)
        for micro in evaluation_order(cfg, task.cut_by_cost, num_rows, part.lengths, block_size):
            index = len(plan.micro_batches)
            plan.micro_batches.append(replace(micro, ids=micro.ids + first_id, index=index))
            plan.id_offsets.append(first_id - first_row)
        rows = slice(first_row, first_row + num_rows)
        source = Part(name, rows, slice(first_micro_batch, len(plan.micro_batches)))
        plan.sources.append(source)
        plan.blocks.extend(split_into_blocks(source, block_size or num_rows, micro_batch_size))
        first_row += num_rows
    return plan


def split_into_blocks(source: Part, block_size: int, micro_batch_size: int) -> Iterator[Part]:
    """Yield the blocks of `block_size` rows of a source; the last one may have fewer."""
    micro_batch = source.micro_batches.start
    for row in range(source.rows.start, source.rows.stop, block_size):
        rows = slice(row, min(row + block_size, source.rows.stop))
        micro_batches_in_block = -(-(rows.stop - rows.start) // micro_batch_size)  # rounded up
        micro_batches = slice(micro_batch, micro_batch + micro_batches_in_block)
        yield Part(source.name, rows, micro_batches)
        micro_batch = micro_batches.stop


# ---- results ---------------------------------------------------------------------------------------------------------


def _on_host(batch: Batch, out: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return what a micro-batch adds to the evaluation, in float64 or int64; this waits for the device.

    A value without dimensions is a sum, any other holds one value or vector for each row. All are copies: a view of a
    batch would keep its file of a dataloader worker open, or its memory."""
    values = {}
    for name, value in out.items():
        dtype = torch.float64 if value.is_floating_point() else torch.int64
        values[name] = value.cpu().to(dtype, copy=True).numpy()
    for name, value in (batch.sums | {"weight": batch.weight}).items():
        values[name] = np.asarray(value, np.float64)
    return values


def _eval_line(backend: Backend, task: Task, plan: Plan, results: list[Result]) -> dict:
    """Return the eval line of metrics.jsonl from all ranks' results; for a mixture, also each source's metrics."""
    names, row_formats = _check_names(backend, results)
    _check_coverage(backend, plan, results)
    table = _gather_sums(backend, plan, results, names)
    values = _gather_rows(backend, plan, results, row_formats)
    sums_by_block = getattr(task, "sums_by_block", None)
    if sums_by_block is not None:  # a loss over a whole batch
        names, table = backend.compute_on_main(lambda: sums_by_block(names, table, values, plan.blocks))
    line = _divide(task, names, table, plan.num_examples)
    if plan.sources[0].name:  # a mixture
        by_source = {source.name: _metrics_of_source(task, names, table, source) for source in plan.sources}
        line = _add_sources(line, by_source)
    if values:
        line |= backend.compute_on_main(lambda: task.row_metrics(values))
    # JSON knows no number of numpy, which a task's metrics may be.
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in line.items()}


def _check_names(backend: Backend, results: list[Result]) -> tuple[list[str], dict[str, list]]:
    """Return the names of sums, and {name: [dtype, *width]} of values by row; raise UsageError unless all micro-batches of
    all ranks have the same.

    Otherwise a sum would be dropped, or a vector of length 1 be repeated."""
    signature, *others = backend.hosts.union({_signature(values) for _, values in results})
    if others:
        raise UsageError(
            f"the task returns {signature} for some micro-batches of an evaluation, but {others[0]} for others: return "
            "the same names and widths for all rows, with the value 0 where there is nothing to count"
        )
    names, row_formats = json.loads(signature)
    return names, row_formats


def _signature(values: dict[str, np.ndarray]) -> str:
    """Return what `_check_names` compares, as a text that ranks can exchange."""
    row_formats = {name: [str(value.dtype), *value.shape[1:]] for name, value in values.items() if value.ndim}
    names = sorted(values.keys() - row_formats.keys())
    return json.dumps([names, row_formats], sort_keys=True)


def _rows_of(plan: Plan, micro: MicroBatch) -> np.ndarray:
    """Return the rows of a micro-batch among all evaluated examples."""
    return micro.ids - plan.id_offsets[micro.index]


def _check_coverage(backend: Backend, plan: Plan, results: list[Result]) -> None:
    """Raise AssertionError unless the ranks together evaluated every example once."""
    times_seen = np.zeros(plan.num_examples)
    for micro, _ in results:
        times_seen[_rows_of(plan, micro)] += 1
    assert (backend.hosts.sum(times_seen) == 1).all(), "not every example was evaluated exactly once"


def _gather_sums(backend: Backend, plan: Plan, results: list[Result], names: list[str]) -> np.ndarray:
    """Return the sums of all ranks in a table (micro-batches, names).

    An entry is one rank's number, and zero on the others, so the sum over ranks is exact."""
    table = np.zeros((len(plan.micro_batches), len(names)))
    for micro, values in results:
        table[micro.index] = [values[name] for name in names]
    return backend.hosts.sum(table).numpy()


def _gather_rows(
    backend: Backend, plan: Plan, results: list[Result], row_formats: dict[str, list]
) -> dict[str, np.ndarray]:
    """Return the values by row of all ranks, in the order of the data; the sums over ranks are exact, as above."""
    columns = {}
    for name, (dtype, *width) in row_formats.items():
        column = np.zeros((plan.num_examples, *width))
        for micro, values in results:
            column[_rows_of(plan, micro)] = values[name]
        columns[name] = backend.hosts.sum(column).numpy().astype(dtype)
    return columns


def _metrics_of_source(task: Task, names: list[str], table: np.ndarray, source: Part) -> dict:
    """Return the metrics of one source of a mixture."""
    return _divide(task, names, table[source.micro_batches], source.rows.stop - source.rows.start)


def _add_sources(total: dict, by_source: dict[str, dict]) -> dict:
    """Return the metrics of a mixture, and those of its sources as `source/metric`.

    A metric that some source lacks is dropped from the total: bits_per_byte, for example, is unknown for pretokenized
    rows. Sources without targets have no metrics, and do not count."""
    line = dict(total)
    for metrics in by_source.values():
        if metrics["weight"]:
            line = {name: value for name, value in line.items() if name in metrics}
    for source, metrics in by_source.items():
        for name, value in metrics.items():
            line[f"{source}/{name}"] = value
    return line


def _divide(task: Task, names: list[str], table: np.ndarray, examples: int) -> dict:
    """Return loss, weight, examples and the task's metrics from a table of sums by micro-batch."""
    totals = np.cumsum(table, axis=0)[-1]  # cumsum adds in order, one by one
    sums = dict(zip(names, totals.tolist(), strict=True))
    weight = sums.pop("weight")
    if not weight:  # rows without a target
        return {"loss": None, "weight": weight, "examples": examples}
    return {"loss": sums["loss"] / weight, "weight": weight, "examples": examples} | task.metrics(sums, weight)
