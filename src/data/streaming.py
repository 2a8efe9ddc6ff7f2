"""Streaming data: rows read from shards as they come, the same steps on any number of processes.

Tests: tests/data/test_streaming.py. The shards (files) of a pass, in an order of its own, are dealt to `stream_lanes`
lanes; every global batch takes the same number of rows from each lane, and every rank reads lanes of its own. So what a
step holds depends on the lanes, not on the processes. Rows are shuffled within a block, which is read again after a resume.
"""

import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

import numpy as np
import pyarrow as pa
import torch
import xxhash

from src.config.errors import UsageError, warn
from src.config.schema import RunConfig
from src.data.arrow_columns import check_kinds, views
from src.data.batch_plan import MicroBatch, derive_seed, permute, split_into_micro_batches
from src.data.data_loader import Item, collate, read_ahead
from src.data.row_location import ShardRowLocations, check_decodable
from src.data.sources import Source
from src.download.remote_files import retry_reads
from src.tasks import Task
from src.text.given_ids import OPTIONAL_COLUMNS

BLOCK = 512  # raw rows that a lane encodes, packs and shuffles together, and reads again after a resume
UNEVEN = 2  # times the mean, above which a lane is too long
LANES = 8  # by default, where there are as many shards and a global batch gives eight rows to each


@dataclass(frozen=True)
class StreamPosition:
    """Where a lane is in a pass: shards done, blocks done of the next, rows taken from the block after those."""

    shards: int = 0
    blocks: int = 0
    rows: int = 0


class Stream:
    """A source that is read as it goes; stands where a split stands, but has no length."""

    quotas = lengths = None

    def __init__(self, cfg: RunConfig, task: Task, source: Source):
        self.cfg, self.task, self.source = cfg, task, source
        self.whole = None if source.builder else source.stream(cfg)
        self.shards = source.files if source.builder else [f"{source} {i}" for i in range(self.whole.num_shards)]
        self.lanes = cfg.stream_lanes or max(1, min(LANES, len(self.shards), cfg.global_batch_size // 8))
        if self.lanes > len(self.shards):  # a lane without a shard would take its share from every step
            raise UsageError(
                f"stream_lanes is {self.lanes}, but there are {len(self.shards)} shards (files): give at most as many lanes, or "
                "more files"
            )
        self.columns, self.stamps = None, {}
        self._inspect_columns()
        # By names and sizes: files may be moved, and nodes have copies of their own.
        told = repr((source.versions(), source.hub, len(self.shards), self.lanes, BLOCK, task.fingerprint()))
        self.stats = {"examples": None, "rows": xxhash.xxh3_128_hexdigest(told.encode()), "files": source.sizes()}
        self.stats |= {"tokenizer": xxhash.xxh3_128_hexdigest(task.fingerprint().encode()), "sample": source.sample()}
        self.epoch, self.turned, self.positions = 0, False, {}
        self._weigh([size for _, size, _ in source.versions()])

    def _weigh(self, sizes: list[int | None]) -> None:
        """Warn where one lane of the first pass is much longer than the others: when those are at their end, steps are small."""
        if self.whole is None and None not in sizes:
            order = permute(np.arange(len(sizes)), len(sizes), self.cfg.seed, 0)
            lanes = [sum(sizes[i] for i in order[lane :: self.lanes]) for lane in range(self.lanes)]
            if (times := max(lanes) / (sum(lanes) / self.lanes)) > UNEVEN:
                warn(
                    f"{self.source.field}: the files are uneven: the longest of {self.lanes} lanes has {times:.1f} times the mean, "
                    "and steps are smaller than global_batch_size when the others are at their end: give more even files, "
                    "or fewer --stream_lanes"
                )

    def _inspect_columns(self) -> None:
        """Learn the columns from the first rows there are, and keep one for ranks that have nothing to read; UsageError where
        all rows are read and there is nothing to learn."""
        from datasets import Dataset

        try:
            features = self._rows(0).features
        except Exception as error:
            raise UsageError(self.source.explain(error, self.shards[:1])) from error
        if features:  # Parquet tells them without a row, and then only needed columns travel
            empty = Dataset.from_dict({name: [] for name in features}, features=features)
            self.columns, _ = self.task.inspect_columns(empty, "train", whole=False)
            if self.whole is not None:
                self.whole = self.source.stream(self.cfg, columns=self.columns)
        known = False
        for shard in range(len(self.shards)):
            for block, table in enumerate(self.blocks(shard)):
                if not known:
                    self.columns, features = self.task.inspect_columns(Dataset(table), "train", whole=False)
                    self.schema = features.arrow_schema
                    self.task.on_prepared(features)
                rows = self.encoded(table := table.select(self.columns), shard, block)
                known = known or len(rows["length"]) > 0
                if any(rows["targets"]):
                    self.dummy_row = self.prepared(table, shard, block, 0)[0]
                    return
        raise UsageError(
            f"train data: {self.source} holds no rows with anything to train on: there are none, every one is too short, or all "
            "of their labels are masked (-100)"
        )

    def epoch_at(self, step: int, batch: int) -> float:
        """Return how many passes are over."""
        return float(self.epoch)

    def segments(self) -> list:
        return []

    # ---- rows --------------------------------------------------------------------------------------------------------

    def _rows(self, shard: int):
        if self.whole is None:
            return self.source.stream(self.cfg, self.shards[shard], self.columns)
        return self.whole.shard(num_shards=len(self.shards), index=shard)

    def blocks(self, shard: int) -> Iterator[pa.Table]:
        """Yield the raw rows of a shard in tables of BLOCK rows."""
        name = self.shards[shard]
        try:
            self._unchanged(name)
            for table in retry_reads(lambda: self._rows(shard).with_format("arrow").iter(batch_size=BLOCK), name):
                if missing := [column for column in self.columns or () if column not in table.column_names]:
                    there = ", ".join(table.column_names)
                    raise UsageError(f"{name}: there is no column `{missing[0]}` among {there}, as in shards before it")
                check_kinds(table.schema, self.columns or [], [name], name)
                if "input_ids" in (self.columns or ()) and (
                    late := ({*OPTIONAL_COLUMNS} & {*table.column_names}) - {*self.columns}
                ):
                    raise UsageError(
                        f"{name}: there is a column `{late.pop()}`, unlike in the first shard: give it to all"
                    )
                yield table.select(self.columns) if self.columns else table
            self._unchanged(name)
        except (UsageError, GeneratorExit):
            raise
        except Exception as error:
            raise UsageError(self.source.explain(error, [name])) from error

    def _unchanged(self, name: str) -> None:
        """Raise UsageError where a local shard is no longer the file that it was."""
        if self.source.builder and "://" not in name:
            [now] = self.source.stamps([name])
            if self.stamps.setdefault(name, now) != now:
                raise UsageError(f"{name} changed while it was trained on")

    def encoded(self, table: pa.Table, shard: int, block: int) -> dict[str, list]:
        """Return the columns of the rows that a block becomes."""
        places = ShardRowLocations(self.shards[shard], block * BLOCK, table.num_rows)
        try:
            batch = table.to_pydict()
        except UnicodeDecodeError:
            check_decodable(table, places, lambda rows, i: rows.slice(i, 1).to_pydict())
            raise
        return self.task.encode(batch, places)

    def prepared(self, table: pa.Table, shard: int, block: int, epoch: int) -> list[tuple[int, dict, int]]:
        """Return (id, row, length) of the rows that a block becomes, in an order of its own for this pass."""
        rows = self.encoded(table, shard, block)
        batch = pa.record_batch([pa.array(rows[f.name], f.type) for f in self.schema], schema=self.schema)
        columns, count = views(batch), batch.num_rows
        order = (
            permute(np.arange(count), count, derive_seed("block", self.cfg.seed, shard, block), epoch) if count else []
        )
        first = (shard << 44) | (block << 20)
        return [(first + int(i), {name: take(i) for name, take in columns}, rows["length"][i]) for i in order]

    def lane(
        self, number: int, epoch: int, start: StreamPosition
    ) -> Iterator[tuple[StreamPosition, tuple[int, dict, int]]]:
        """Yield (the cursor after it, (id, row, length)) of the rows of a lane in a pass, from `start` on."""
        order = permute(np.arange(len(self.shards)), len(self.shards), self.cfg.seed, epoch)
        mine = order[number :: self.lanes].tolist()
        for position in range(start.shards, len(mine)):
            begun = start if position == start.shards else StreamPosition(position)
            for block, table in enumerate(self.blocks(mine[position])):
                if block < begun.blocks:
                    continue
                rows = self.prepared(table, mine[position], block, epoch)
                for i in range(begun.rows if block == begun.blocks else 0, len(rows)):
                    yield StreamPosition(position, block, i + 1), rows[i]

    # ---- windows -----------------------------------------------------------------------------------------------------

    def windows(self, rank: int, world: int, progress, pin: bool) -> Iterator[tuple[list[Item], float]]:
        """Yield (this rank's micro-batches of a step, seconds waited) from where `progress` is, without an end.

        A rank whose lanes are at their end gets fillers. When no rank has a row, the caller calls `next_pass`: that was no step,
        and the next pass begins."""
        if rank == 0 and world > min(self.lanes, len(self.shards)):
            warn(
                f"{world} processes share {len(self.shards)} shards in {self.lanes} lanes, so some have nothing to read: give "
                "more files, or more --stream_lanes (which are part of what is trained)"
            )
        mine, step = range(rank, self.lanes, world), progress.step
        saved = progress.stream or {"epoch": 0, "lanes": [[0, 0, 0]] * self.lanes}
        self.epoch, here = saved["epoch"], {lane: StreamPosition(*saved["lanes"][lane]) for lane in mine}
        self.positions = {step: (self.epoch, here)}
        while True:
            self.turned = False
            coming = read_ahead(_Pass(self, mine, here, self.epoch, step), self.cfg, pin)
            while not self.turned:
                began = time.perf_counter()
                try:
                    window, here = next(coming, ([], here))
                except UsageError as error:
                    error.alone = True  # the other ranks read other rows
                    raise
                self.positions = {step: self.positions[step], step + 1: (self.epoch, here)}
                yield window or [self._filler(step)], time.perf_counter() - began
                step += not self.turned
            self.epoch, here = self.epoch + 1, {lane: StreamPosition() for lane in mine}
            self.positions = {step: (self.epoch, here)}

    def next_pass(self) -> None:
        """Start the next pass with the next window: no rank has a row left in this one."""
        self.turned = True

    def position(self, step: int, host_group) -> dict:
        """Return where all lanes are after `step`, the same on every rank."""
        epoch, cursors = self.positions[step]
        table = torch.zeros(self.lanes, 3, dtype=torch.float64)
        for lane, cursor in cursors.items():
            table[lane] = torch.tensor(astuple(cursor), dtype=torch.float64)
        return {"epoch": epoch, "lanes": [[int(x) for x in row] for row in host_group.sum(table).tolist()]}

    def _filler(self, step: int) -> Item:
        number, row, _ = self.dummy_row
        return collate(self.task, MicroBatch(np.array([number]), 0, step, dummy=True), [row])


class _Pass(torch.utils.data.IterableDataset):
    """The windows of one rank in the rest of a pass, each with where its lanes are after it."""

    def __init__(self, stream: Stream, mine: range, cursors: dict[int, StreamPosition], epoch: int, step: int):
        self.stream, self.mine, self.cursors, self.epoch, self.step = stream, mine, dict(cursors), epoch, step

    def __iter__(self) -> Iterator[tuple[list[Item], dict[int, StreamPosition]]]:
        stream, cfg, step = self.stream, self.stream.cfg, self.step
        lanes = {lane: stream.lane(lane, self.epoch, self.cursors[lane]) for lane in self.mine}
        while lanes:
            window = []
            for lane in list(lanes):
                share = cfg.global_batch_size // stream.lanes + (lane < cfg.global_batch_size % stream.lanes)
                rows = []
                while len(rows) < share and (item := next(lanes[lane], None)):
                    self.cursors[lane] = item[0]
                    rows.append(item[1])
                if len(rows) < share:
                    del lanes[lane]
                window += self._cut(rows, lane, step)
            if window:
                yield _closed(stream.task, window), dict(self.cursors)
                step += 1

    def _cut(self, rows: list[tuple[int, dict, int]], lane: int, step: int) -> list[tuple[MicroBatch, list[dict]]]:
        """Return (micro-batch, its rows) of a lane's share of a global batch."""
        cfg, lengths = self.stream.cfg, np.array([length for *_, length in rows], np.int64)
        parts = split_into_micro_batches(
            np.arange(len(rows)), cfg.per_device_batch_size, lengths, cfg.per_device_batch_tokens
        )
        return [
            (
                MicroBatch(
                    np.array([rows[i][0] for i in part]),
                    derive_seed("micro-batch", cfg.seed, "stream", step, lane, j),
                    step,
                    (lane << 20) | j,
                    cost,
                    last=False,
                ),
                [rows[i][1] for i in part],
            )
            for j, (part, cost) in enumerate(parts)
        ]


def _closed(task: Task, window: list[tuple[MicroBatch, list[dict]]]) -> list[Item]:
    """Return the batches of a window, the last of which is marked."""
    last = len(window) - 1
    return [collate(task, replace(micro, last=i == last), rows) for i, (micro, rows) in enumerate(window)]
