"""Plan of an evaluation, the same for any number of processes, and the results of one rank for its micro-batches.

Tests: tests/training/test_evaluation.py.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from src.config.schema import RunConfig
from src.data.batch_plan import MicroBatch, evaluation_order
from src.distributed.strategies import Strategy
from src.tasks import Batch, Task

FLUSH = 64  # micro-batches; their results stay on the device before they are copied to the host
TIMES_SEEN = "times seen"


class Source(NamedTuple):
    """One source of the evaluated mixture; the name is empty if the data is not a mixture."""

    name: str
    rows: slice  # of the table of sums
    examples: int


class Block(NamedTuple):
    """A global batch of an evaluation: consecutive rows, and their micro-batches."""

    rows: slice
    micro_batches: slice


class Plan(NamedTuple):
    """All micro-batches of an evaluation; they do not depend on the number of processes."""

    micro_batches: list[MicroBatch]
    first_row: list[int]  # by micro-batch: an example's id minus this is its row among all evaluated examples
    sources: list[Source]
    blocks: list[Block]  # rows of the table of sums if the loss is over a whole batch; else empty

    @property
    def examples(self) -> int:
        return sum(source.examples for source in self.sources)


def make_plan(split, cfg: RunConfig, task: Task) -> Plan:
    """Return the plan of an evaluation of at most `cfg.max_eval_examples` rows of each source of `split`."""
    micro_batches, first_row, sources, blocks, examples = [], [], [], [], 0
    size = cfg.global_batch_size if hasattr(task, "sums_by_block") else None
    for name, first_id, part in split.segments():
        count = min(len(part), cfg.max_eval_examples or len(part))
        begin, first_block = len(micro_batches), len(blocks)
        for micro in evaluation_order(count, cfg.per_device_eval_batch_size, cfg.seed, part.lengths, size):
            micro_batches.append(replace(micro, ids=micro.ids + first_id, index=len(micro_batches)))
            first_row.append(first_id - examples)
        if size:
            blocks += _blocks(count, size, cfg.per_device_eval_batch_size, examples, begin)
        rows = slice(first_block, len(blocks)) if size else slice(begin, len(micro_batches))
        sources.append(Source(name, rows, count))
        examples += count
    return Plan(micro_batches, first_row, sources, blocks)


def _blocks(count: int, size: int, micro_batch: int, first_row: int, first_micro_batch: int) -> list[Block]:
    """Return the blocks of `size` rows of a source of `count` rows; micro-batches never cross blocks."""
    blocks = []
    for start in range(0, count, size):
        stop = min(start + size, count)
        last = first_micro_batch - (start - stop) // micro_batch
        blocks.append(Block(slice(first_row + start, first_row + stop), slice(first_micro_batch, last)))
        first_micro_batch = last
    return blocks


def share_of_rank(strategy: Strategy, micro_batches: list[MicroBatch], rounds: int) -> list[MicroBatch]:
    """Return this rank's micro-batches; for a sharded model, plus dummies, so that all ranks run `rounds` passes."""
    mine = micro_batches[strategy.data_rank :: strategy.data_world_size]
    if strategy.is_sharded:
        mine += [replace(micro_batches[0], dummy=True)] * (rounds - len(mine))
    return mine


class Results:
    """This rank's sums by micro-batch and values by example, on the host; zero if another rank computes them."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.names: list[str] = []  # columns of the table: weight, then the sums of the task
        self.table: np.ndarray | None = None  # (micro-batches, names)
        self.per_example: dict[str, np.ndarray] = {}
        self.pending: list[tuple[MicroBatch, Batch, dict[str, torch.Tensor]]] = []
        self.seen: set[tuple[str, ...]] = set()  # what a micro-batch returned: names, and the shapes of rows

    def add(self, micro: MicroBatch, batch: Batch, out: dict[str, torch.Tensor]) -> None:
        self.pending.append((micro, batch, out))
        if len(self.pending) == FLUSH:
            self.flush()

    def flush(self) -> None:
        """Copy pending results to the host; this waits for the device."""
        for micro, batch, out in self.pending:
            sums = {name: value for name, value in out.items() if value.dim() == 0} | batch.sums
            shapes = {
                name: f" (rows, {str([*value.shape[1:]])[1:-1]})" for name, value in out.items() if value.dim() > 1
            }
            self.seen.add(tuple(sorted(name + shapes.get(name, "") for name in {*out, *batch.sums})))
            if len(self.seen) > 1:  # `_names_on_all_ranks` raises an error
                break
            if self.table is None:
                self.names = ["weight", *sorted(sums)]
                self.table = np.zeros((len(self.plan.micro_batches), len(self.names)))
            self.table[micro.index] = [batch.weight, *(float(sums[name]) for name in self.names[1:])]
            rows = micro.ids - self.plan.first_row[micro.index]
            for name, value in out.items():
                if value.dim():
                    dtype = float if value.is_floating_point() else np.int64
                    self._column(name, value.shape[1:], dtype)[rows] = value.double().cpu().numpy()
            self._column(TIMES_SEEN, (), np.int64)[rows] += 1
        self.pending.clear()

    def _column(self, name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """Return the values of all examples, (examples, *shape); every row of an evaluation has the same shape."""
        if name not in self.per_example:
            self.per_example[name] = np.zeros((self.plan.examples, *shape), dtype)
        return self.per_example[name]
