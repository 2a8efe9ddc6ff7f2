"""Streaming data: rows are read from shards during training; steps are the same on any number of processes.

At the start of each pass through the data, the shards (files) are shuffled and divided into a fixed number of groups
(`stream_lanes`). Every global batch takes the same number of rows from each group, and each rank reads some of the
groups. So the number of processes changes which rank reads a row, not the step that it is in. Rows are shuffled within
a block of consecutive rows; on resume, the current block is read again to rebuild its shuffle.
Tests: tests/addons/streaming/test_streaming.py.
"""

import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from addons.streaming.shards import BLOCK, PreparedRow, StreamShards
from addons.streaming.sources import StreamSource
from engine.config.errors import UsageError
from engine.config.run_config import field_values
from engine.plan.batch_plan import MicroBatch, PlanConfig, sizes_of_run, split_into_micro_batches
from engine.plan.data_loader import Item, StepBatch, changed_plan, collate, open_loader
from engine.plan.row_order import permute
from engine.plan.seeding import derive_seed
from engine.rows.columns import with_columns
from engine.task import Task

if TYPE_CHECKING:
    from engine.distributed.backends import Backend
    from engine.distributed.host_group import HostGroup

ENDLESS = 1 << 62  # rows, for the sizes of steps
GROUPS = 8  # default number of shard groups; lower with few shards or a small global batch


@dataclass(frozen=True)
class StreamPosition:
    """Position of a shard group: finished shards, finished blocks of the next shard, rows used of the next block."""

    shards: int = 0
    blocks: int = 0
    rows: int = 0


Positions = dict[int, StreamPosition]  # key: number of the shard group


class Stream:
    """Training data that is read during training, with the interface of `Split` except what needs a length."""

    quotas = lengths = None

    def __init__(self, cfg: Any, task: Task, source: StreamSource):
        self.cfg, self.task = cfg, task
        self.shards = StreamShards(source, task, cfg.seed)
        # A stream draws no rows by it: it has the cut of micro-batches, and what add-ons change: the sizes of steps, and
        # the lengths of their rows.
        plan = PlanConfig(
            ENDLESS,
            cfg.global_batch_size,
            cfg.per_device_batch_size,
            cfg.seed,
            max_tokens=cfg.per_device_batch_tokens,
            step_sizes=sizes_of_run(cfg, ENDLESS),
            by_cost=task.cut_by_cost,
            multiple_of=cfg.pad_to_multiple_of or 1,
        )
        self.plan = changed_plan(plan, cfg, task, self)
        count = len(self.shards)
        self.shard_groups = field_values(cfg)["stream_lanes"] or max(1, min(GROUPS, count, cfg.global_batch_size // 8))
        if self.shard_groups > count:  # a group without a shard would leave its share of every step empty
            raise UsageError(
                f"stream_lanes is {self.shard_groups}, but there are {count} shards (files): give at most {count}, or more "
                "files"
            )
        if self.rows_in_step(0) < self.shard_groups:
            raise UsageError(
                f"the first step has {self.rows_in_step(0)} rows, but the stream has {self.shard_groups} shard groups, and each "
                "gives at least one row to every step: raise batch_size_warmup_start, or lower --stream_lanes"
            )
        # Names and sizes, not paths: files may be moved, and each node may have its own copy.
        content = (
            source.versions(),
            source.hub,
            count,
            self.shard_groups,
            BLOCK,
            task.fingerprint(),
            sorted(cfg.columns.items()),
        )
        self.stats = {
            "examples": None,
            "rows": xxhash.xxh3_128_hexdigest(repr(content).encode()),
            "sample": source.sample(),
            "row_description": with_columns(self.shards.task.row_description, cfg.columns),
        }
        self.epoch = 0
        # step -> (pass, positions of this rank's groups after it)
        self.positions: dict[int, tuple[int, Positions]] = {}

    def rows_in_step(self, step: int) -> int:
        """Return the global batch of a step."""
        start, stop = self.plan.sizes.positions(0, step)
        return stop - start

    def epoch_at(self, step: int, cfg: Any) -> float:
        """Return the number of finished passes."""
        return float(self.epoch)

    def segments(self) -> list:
        return []

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step_batches(self, backend: "Backend", state, pin_memory: bool) -> Iterator[tuple[StepBatch, float]]:
        """Yield (this rank's micro-batches, seconds waited for them) for each step, from the position in `state`, without end.

        A rank gets dummy batches when its groups have ended. When no rank has a row left, the next pass begins: ranks sum
        their micro-batches before each step, which is a collective."""
        mine = range(backend.data_rank, self.shard_groups, backend.data_world_size)
        step = state.step
        saved = state.stream or {"epoch": 0, "lanes": [[0, 0, 0]] * self.shard_groups}
        self.epoch = saved["epoch"]
        positions = {group: StreamPosition(*saved["lanes"][group]) for group in mine}
        self.positions = {step: (self.epoch, positions)}
        while True:
            items = _read_ahead(_Pass(self, positions, self.epoch, step), self.cfg, pin_memory)
            while True:
                started = time.perf_counter()
                batch, positions = next(items, ([], positions))
                batch_or_dummy = batch or [self._dummy_batch(step)]
                seconds = time.perf_counter() - started
                if not backend.hosts.sum([float(len(batch))])[0]:
                    break
                self.positions = {step: self.positions[step], step + 1: (self.epoch, positions)}
                yield batch_or_dummy, seconds
                step += 1
            self.epoch += 1
            positions = {group: StreamPosition() for group in mine}
            self.positions = {step: (self.epoch, positions)}

    def position(self, step: int, host_group: "HostGroup") -> dict:
        """Return the positions of all shard groups after `step`, collected from all ranks by an all-reduce."""
        epoch, positions = self.positions[step]
        table = torch.zeros(self.shard_groups, 3, dtype=torch.float64)
        for group, position in positions.items():
            table[group] = torch.tensor(astuple(position), dtype=torch.float64)
        return {"epoch": epoch, "lanes": [[int(x) for x in row] for row in host_group.sum(table).tolist()]}

    def _dummy_batch(self, step: int) -> Item:
        number, row, _ = self.shards.dummy_row
        return collate(self.task, MicroBatch(np.array([number]), 0, step, dummy=True), [row])


def _read_ahead(batches: torch.utils.data.IterableDataset, cfg: Any, pin_memory: bool) -> Iterator:
    """Yield the items of `batches`, read ahead by one dataloader worker if dataloader_num_workers is not 0."""
    workers = min(1, cfg.dataloader_num_workers)
    if not workers and not pin_memory:
        return iter(batches)
    return open_loader(batches, cfg, workers, pin_memory)


class _Pass(torch.utils.data.IterableDataset):
    """Steps of one rank for the rest of a pass: its micro-batches, and the positions of its shard groups after them."""

    def __init__(self, stream: Stream, positions: Positions, epoch: int, step: int):
        self.stream, self.positions, self.epoch, self.step = stream, dict(positions), epoch, step

    def __iter__(self) -> Iterator[tuple[StepBatch, Positions]]:
        step = self.step
        groups = {group: self._group_rows(group, start) for group, start in self.positions.items()}
        while groups:
            batch = []
            for group in list(groups):
                share = self._share(group, step)
                taken = list(islice(groups[group], share))
                if taken:
                    self.positions[group] = taken[-1][0]
                if len(taken) < share:
                    del groups[group]
                batch += self._split([row for _, row in taken], group, step)
            if batch:
                last = len(batch) - 1
                items = [(replace(micro, last=i == last), rows) for i, (micro, rows) in enumerate(batch)]
                yield [collate(self.stream.task, micro, rows) for micro, rows in items], dict(self.positions)
                step += 1

    def _group_rows(self, group: int, start: StreamPosition) -> Iterator[tuple[StreamPosition, PreparedRow]]:
        """Yield (position after the row, row) of a shard group for the rest of this pass, from `start`."""
        shards = self.stream.shards
        order = permute(np.arange(len(shards)), len(shards), self.stream.cfg.seed, self.epoch)
        order = order[group :: self.stream.shard_groups].tolist()
        for position in range(start.shards, len(order)):
            begin = start if position == start.shards else StreamPosition(position)
            for block, raw in enumerate(shards.blocks(order[position])):
                if block < begin.blocks:
                    continue
                rows = shards.prepare(raw, order[position], block, self.epoch)
                for i in range(begin.rows if block == begin.blocks else 0, len(rows)):
                    yield StreamPosition(position, block, i + 1), rows[i]

    def _share(self, group: int, step: int) -> int:
        """Return the number of rows that a shard group contributes to the global batch of a step."""
        size, groups = self.stream.rows_in_step(step), self.stream.shard_groups
        return size // groups + (group < size % groups)

    def _split(self, rows: list[PreparedRow], group: int, step: int) -> list[tuple[MicroBatch, list[dict]]]:
        """Split a shard group's rows of a global batch into micro-batches. Return (micro-batch, its rows) pairs."""
        cfg = self.stream.cfg
        lengths = np.array([length for *_, length in rows], np.int64)
        plan = self.stream.plan
        max_length = plan.max_length(step) if plan.max_length else None
        parts = split_into_micro_batches(np.arange(len(rows)), plan, lengths, max_length)
        micro_batches = []
        for j, (part, cost) in enumerate(parts):
            ids = np.array([rows[i][0] for i in part])
            seed = derive_seed("micro-batch", cfg.seed, "stream", step, group, j)
            micro = MicroBatch(ids, seed, step, (group << 20) | j, cost, last=False)
            micro_batches.append((micro, [rows[i][1] for i in part]))
        return micro_batches
