"""Shards (files) of a stream: open, read in blocks, encode.

Tests: tests/addons/streaming/.
"""

import copy
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from addons.streaming.sources import StreamSource
from engine.config.errors import UsageError
from engine.plan.row_order import permute
from engine.plan.seeding import derive_seed
from engine.rows.examples import (
    Examples,
    FileExamples,
    files_to_read,
    kind_of_files,
    open_builder,
    read_errors,
    refuse_references,
)
from engine.rows.file_parts import File, Part, Place, Row, make_row
from engine.rows.prepare import encode_rows, inspect_columns
from engine.rows.prepared_split import column_readers
from engine.rows.read_tables import rows_of_table
from engine.task import Task

if TYPE_CHECKING:
    from datasets import IterableDataset

BLOCK = 512  # number of raw rows that are encoded, packed and shuffled together; a resume reads the whole block again

PreparedRow = tuple[int, dict, int]  # (id, prepared row, its length)


class StreamShards:
    """Shards and columns of a stream. `dummy_row` is a row with a target, for ranks that have no rows left."""

    def __init__(self, source: StreamSource, task: Task, seed: int):
        self.source, self.task, self.seed = source, task, seed
        self.examples = _open(source)
        self.file_keys: dict[str, list] = {}  # local file -> size and timestamps at the first read
        self._inspect()
        self.task = copy.copy(task)  # the task reads the columns of evaluation data next, which may be others

    def __len__(self) -> int:
        return len(self.examples.files)

    def _inspect(self) -> None:
        """Find columns, schema and dummy row in the first rows. Raise UsageError if no row has a target."""
        if self.examples.column_names:
            self.columns, features = inspect_columns(self.task, self.examples)
            self.schema: pa.Schema = features.arrow_schema
            self.task.on_prepared(features)
            for shard in range(len(self)):
                for block, rows in enumerate(self.blocks(shard)):
                    encoded, _, _ = self._encode(rows)
                    if any(encoded["targets"]):
                        self.dummy_row = self.prepare(rows, shard, block, 0)[0]
                        return
        raise UsageError(
            f"train data: {self.source} has no row to train on: it is empty, or every row is too short or has "
            "only masked labels (-100), or is longer than max_length, and long_rows: drop leaves it out"
        )

    def blocks(self, shard: int) -> Iterator[list[Row]]:
        """Yield the raw rows of a shard, BLOCK at a time."""
        file = self.examples.files[shard]
        self._refuse_changed(file.path)
        rows = self.examples.rows(self.columns, file)
        while block := list(islice(rows, BLOCK)):
            yield block
        self._refuse_changed(file.path)

    def _refuse_changed(self, path: str) -> None:
        """Raise UsageError if a local file has changed since its first read."""
        if self.source.kind and "://" not in path:
            [now] = self.source.file_keys([path])
            if self.file_keys.setdefault(path, now) != now:
                raise UsageError(f"{path} changed during training: restore the file and run again")

    def _encode(self, rows: list[Row]) -> tuple[dict[str, list], pa.RecordBatch, np.ndarray]:
        decoded = self.examples.decode(rows, self.columns, self.task.decode_media)
        return encode_rows(self.task, decoded, self.columns, self.schema)

    def prepare(self, rows: list[Row], shard: int, block: int, epoch: int) -> list[PreparedRow]:
        """Encode a block and return its rows, in an order that depends on seed, shard, block and epoch."""
        encoded, batch, _ = self._encode(rows)
        columns, count = column_readers(batch), batch.num_rows
        if not count:
            return []
        order = permute(np.arange(count), count, derive_seed("block", self.seed, shard, block), epoch)
        first = (shard << 44) | (block << 20)
        return [(first + i, {name: read(i) for name, read in columns}, encoded["length"][i]) for i in order.tolist()]


class StreamedFiles(FileExamples):
    """Rows of files, of which a task looks at the first ones only. A file may have none."""

    is_stream = True


class StreamedDataset(Examples):
    """Rows that `datasets` streams, such as media; each of its shards counts as a file."""

    def __init__(self, source: StreamSource, rows: "IterableDataset"):
        super().__init__(source)
        self.dataset = rows.with_format("arrow")
        names = [f"{source} {i}" for i in range(rows.num_shards)]
        self.files = [File(name, "arrow", name) for name in names]

    @cached_property
    def _first_table(self) -> pa.Table:
        return next(iter(self.dataset.iter(batch_size=BLOCK)), pa.table({}))

    @cached_property
    def raw_features(self) -> dict[str, Any]:
        from datasets import Features

        return dict(self.dataset.features or Features.from_arrow_schema(self._first_table.schema))

    @property
    def raw_names(self) -> list[str]:
        return list(self.raw_features)

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[Part]:
        yield Part(self.files[0], 0, 0, self._first_table)

    def parts_of(self, file: File, columns: Sequence[str] | None = None) -> Iterator[Part]:
        """Yield the parts of a shard."""
        first = 0
        shard = self.dataset.shard(num_shards=len(self.files), index=self.files.index(file))
        with read_errors(self.source, [file.name]):
            for table in shard.iter(batch_size=BLOCK):
                yield Part(file, 0, first, table)
                first += len(table)

    def read_part(self, part: Part, columns: Sequence[str] | None = None) -> list[Row]:
        place = Place("train data", part.file.name, "row", 0)
        rows = rows_of_table(part.content, columns)
        return [make_row(place._replace(number=part.first + i), row) for i, row in enumerate(rows)]


def _open(source: StreamSource) -> StreamedFiles | StreamedDataset:
    """Return the rows of files, of a folder or of a Hub dataset."""
    import datasets

    refuse_references()
    datasets.config.STREAMING_READ_MAX_RETRIES = 3  # default 20; one of those waits as long as three of our retries
    if source.kind:
        return StreamedFiles(source, files_to_read(source, source.kind, source.files))
    with read_errors(source):
        builder, data_files, _, split = open_builder(source, None)
        kind = kind_of_files(builder)
        files = [str(file) for file in data_files.get(split, ())]
        if kind and files:
            return StreamedFiles(source, files_to_read(source, kind, files, getattr(builder.config, "sep", ",")))
        return StreamedDataset(source, builder.as_streaming_dataset(split or source.dataset_split or source.split))
