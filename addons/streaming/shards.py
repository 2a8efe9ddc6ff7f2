"""Shards (files) of a stream: open, read in blocks, encode.

Tests: tests/addons/streaming/.
"""

import copy
import glob
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from addons.streaming.sources import StreamSource, same_version
from engine.config.errors import UsageError
from engine.data.column_types import join_features, keep_json_text, refuse_missing_columns
from engine.data.file_columns import features_of_file, refuse_mixed_types
from engine.data.prepared_split import column_readers, keep_encoded
from engine.data.raw_rows import explain_read_error, refuse_references
from engine.data.row_errors import encode_rows, line_of, read_rows
from engine.data.row_order import permute
from engine.data.seeding import derive_seed
from engine.data.sources import named_files
from engine.storage import http_files
from engine.task import Task
from engine.text.chat_turns import find_structs
from engine.text.row_columns import by_part, check_columns, columns_by_name, named_in_errors

BLOCK = 512  # number of raw rows that are encoded, packed and shuffled together; a resume reads the whole block again

Row = tuple[int, dict, int]  # (id, prepared row, its length)


class StreamShards:
    """Shards and columns of a stream. `dummy_row` is a row with a target, for ranks that have no rows left."""

    def __init__(self, source: StreamSource, task: Task, seed: int):
        self.source, self.task, self.seed = source, task, seed
        self.dataset = None if source.builder else _open_dataset(source)  # only for a folder or Hub dataset
        self.names = list(source.files)
        if self.dataset is not None:
            self.names = [f"{source} {i}" for i in range(self.dataset.num_shards)]
        self.columns: list[str] | None = None
        self.late_columns: set[str] = set()
        self.file_keys: dict[str, list] = {}  # local file -> size and timestamps at the first read
        self._inspect()
        self.task = copy.copy(task)  # the task reads the columns of evaluation data next, which may be others

    def __len__(self) -> int:
        return len(self.names)

    def _inspect(self) -> None:
        """Find columns, schema and dummy row in the first rows. Raise UsageError if no row has a target."""
        from datasets import Dataset

        try:
            self.features = features = self._first_features()
        except Exception as error:
            raise UsageError(explain_read_error(self.source, error, self.names[:1])) from error
        if features:  # so that only the needed columns are downloaded and compared
            empty = Dataset.from_dict({name: [] for name in features}, features=features)
            self._choose_columns(empty)
            if self.dataset is not None:
                self.dataset = _open_dataset(self.source, self.columns, self._late_columns())
        is_known = False
        for shard in range(len(self)):
            for block, table in enumerate(self.blocks(shard)):
                if not is_known:
                    features = self._choose_columns(Dataset(table))
                    self.schema = features.arrow_schema
                    self.task.on_prepared(features)
                table = table.select(self.columns)
                rows, _ = self._encode(table, shard, block)
                is_known = is_known or len(rows["length"]) > 0
                if any(rows["targets"]):
                    self.dummy_row = self.prepare(table, shard, block, 0)[0]
                    return
        raise UsageError(
            f"train data: {self.source} has no row to train on: it is empty, or every row is too short or has "
            "only masked labels (-100)"
        )

    def _choose_columns(self, rows):
        """Set the columns that the task reads, as the files name them. Return the features of the prepared rows."""
        names = self.task.cfg.columns
        if self.columns is None:  # later, those that the task does not read are left out
            check_columns(rows.column_names, names, "train", is_mixed=False)
        with named_in_errors(names):
            needed, features = self.task.inspect_columns(by_part(rows, names), "train")
        there = columns_by_name(rows.column_names, names)
        self.columns = list(dict.fromkeys(there[name] for name in needed if name in there))
        self.late_columns |= {name for name in needed if name not in there}
        return features

    def _first_features(self) -> dict:
        """Return the features of the first rows; {} if there are none."""
        from datasets import Features

        rows = self._rows(0)
        table = None if rows.features else next(iter(rows.with_format("arrow").iter(batch_size=1)), None)
        return rows.features or ({} if table is None else Features.from_arrow_schema(table.schema))

    def _rows(self, shard: int):
        """Return the raw rows of a shard as a `datasets.IterableDataset`."""
        if self.dataset is not None:
            return self.dataset.shard(num_shards=len(self), index=shard)
        return _open_file(self.source, self.names[shard], self.columns, self._late_columns())

    def _late_columns(self) -> list[str]:
        """Return the columns that rows must not bring if the first ones lack them."""
        if self.columns is None:
            return []
        return sorted(self.late_columns - {*self.columns})

    def blocks(self, shard: int) -> Iterator[pa.Table]:
        """Yield the raw rows of a shard in tables of BLOCK rows."""
        name = self.names[shard]
        try:
            self._refuse_changed(name)
            if self.columns and self.source.builder == "parquet":  # the reader hides the columns that are not read
                self._check_columns(_open_file(self.source, name).features or {}, name)
            rows = self._rows(shard)
            allowed = [self.task.cfg.columns.get(name, name) for name in self.task.json_columns]
            refuse_mixed_types(rows.features or {}, self.columns or (), allowed, self.source)
            self._check_structs(rows.features or {}, name)
            for table in rows.with_format("arrow").iter(batch_size=BLOCK):
                self._check_columns(table.column_names, name)
                yield table.select(self.columns) if self.columns else table
            self._refuse_changed(name)
        except (UsageError, GeneratorExit):
            raise
        except Exception as error:
            raise UsageError(explain_read_error(self.source, error, [name])) from error

    def _check_columns(self, there, name: str) -> None:
        """Raise UsageError if a shard has other columns or classes than the first one. `there` may be its features."""
        columns = self.columns or []
        refuse_missing_columns(name, there, columns)
        if new := [column for column in self._late_columns() if column in there]:
            raise UsageError(f"{name}: there is a column `{new[0]}`, which the first shard lacks: add it to all shards")
        for column in columns if isinstance(there, dict) else ():
            one, other = (getattr(each[column], "names", None) for each in (self.features, there))
            if one != other:
                raise UsageError(
                    f"{name}: `{column}` has the classes {other}, in the first shard {one}: write them alike"
                )

    def _check_structs(self, features: dict, name: str) -> None:
        """Raise UsageError if a shard has structs, in which a key that a row lacks reads as null, and the first has none."""
        first, here = (find_structs(each, self.columns or ()) for each in (self.features, features))
        if here > first:
            raise UsageError(
                f"{name}: {', '.join(self.columns or ())}: arguments or parameters are structs here, but not in the first "
                "shard: give this file first, or store them as JSON text"
            )

    def _refuse_changed(self, name: str) -> None:
        """Raise UsageError if a local file has changed since its first read."""
        if self.source.builder and "://" not in name:
            [now] = self.source.file_keys([name])
            if self.file_keys.setdefault(name, now) != now:
                raise UsageError(f"{name} changed during training: restore the file and run again")

    def _encode(self, table: pa.Table, shard: int, block: int) -> tuple[dict[str, list], pa.RecordBatch]:
        from datasets import Dataset

        name, first = self.names[shard], block * BLOCK
        ids, describe = range(len(table)), lambda row: f"{name}, {line_of(name, first + row)}: train data"
        rows = keep_json_text(
            by_part(Dataset(table), self.task.cfg.columns)
        )  # decodes values as prepared data does: a table has images as bytes
        rows = rows if self.task.decode_media else keep_encoded(rows)
        return encode_rows(self.task, read_rows(rows, ids, describe), ids, describe, self.schema)

    def prepare(self, table: pa.Table, shard: int, block: int, epoch: int) -> list[Row]:
        """Encode a block and return its rows, in an order that depends on seed, shard, block and epoch."""
        rows, batch = self._encode(table, shard, block)
        columns, count = column_readers(batch), batch.num_rows
        if not count:
            return []
        order = permute(np.arange(count), count, derive_seed("block", self.seed, shard, block), epoch)
        first = (shard << 44) | (block << 20)
        return [(first + i, {name: read(i) for name, read in columns}, rows["length"][i]) for i in order.tolist()]


def _open_dataset(source: StreamSource, columns: list[str] | None = None, late_columns: Sequence[str] = ()):
    """Return the training rows of a folder or Hub dataset, of `columns` only (if given)."""
    from engine.data.builders import load_builder

    _set_up_datasets()
    try:
        builder = load_builder(str(source.name), source.config_name, revision=source.revision)
        data_files = builder.config.data_files or {}
        split = source.dataset_split or source.split
        if columns is None:  # the first time
            named_files(source, data_files)  # refuses those outside of the folder
            source.choose_split(builder.info.splits or data_files)  # refuses an unknown split
        if source.files:
            _join_parquet(builder, [str(file) for file in data_files.get(split, ())])
        return _read_only(builder, columns, late_columns).as_streaming_dataset(split)
    except Exception as error:
        raise UsageError(explain_read_error(source, error)) from error


def _open_file(source: StreamSource, file: str, columns: list[str] | None = None, late_columns: Sequence[str] = ()):
    """Return the raw rows of one file or URL, of `columns` only (if given)."""
    from engine.data.builders import load_builder

    _set_up_datasets()
    options: dict = {}
    if "://" in file:
        client = {"trust_env": True, "timeout": http_files.client_timeout()}
        client |= same_version(file, source.remote.get(file))
        options["storage_options"] = {"client_kwargs": client}
    files = {"train": [file if "://" in file else glob.escape(file)]}  # it may hold [ or *, and is no pattern
    builder = load_builder(str(source.builder), data_files=files, **options)
    return _read_only(builder, columns, late_columns).as_streaming_dataset("train")


def _join_parquet(builder, files: list[str]) -> None:
    """Make the builder of local Parquet files cast columns to the types of all files instead of the first one."""
    from datasets.packaged_modules.parquet.parquet import Parquet

    if isinstance(builder, Parquet) and builder.info.features is None:
        builder.info.features = join_features(features_of_file("parquet", file) for file in files)


def _read_only(builder, columns: list[str] | None, late_columns: Sequence[str]):
    """Make a builder of `datasets` read only these columns (None: all). Return it."""
    if hasattr(builder.config, "columns"):  # Parquet
        builder.config.columns = columns
    builder.only_columns, builder.late_columns = columns, late_columns  # JSON and CSV
    return builder


def _set_up_datasets() -> None:
    import datasets

    refuse_references()
    datasets.config.STREAMING_READ_MAX_RETRIES = 3  # default 20; one of those waits as long as three of our retries
