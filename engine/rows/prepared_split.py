"""Prepared rows of one split: memory-mapped, read by row id; columns of Arrow tables; statistics as text.

Tests: tests/engine/plan/test_data_loader.py, tests/engine/rows/test_prepare.py, tests/addons/streaming/test_stream_media.py.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

COUNTS = ("length", "targets", "cut")  # columns for the batch plan and statistics; not passed to `collate`
MEDIA = ("Image", "Audio", "Video")  # features of `datasets` that are stored as bytes and a path


def column_readers(batch: pa.RecordBatch) -> list[tuple[str, Callable[[int], object]]]:
    """Return (name, function that returns the value of row i) of each column that `collate` gets.

    Lists of numbers and bytes become numpy views (no copy), numbers numpy scalars, and other values Python objects."""
    columns = zip(batch.schema.names, batch.columns, strict=True)
    return [(name, _reader(column)) for name, column in columns if name not in COUNTS]


def _reader(column: pa.Array) -> Callable[[int], object]:
    if pa.types.is_fixed_size_list(column.type) and _is_number(column.type.value_type) and not column.null_count:
        return column.flatten().to_numpy().reshape(-1, column.type.list_size).__getitem__
    if _is_list(column.type) and _is_number(column.type.value_type):
        offsets = column.offsets.to_numpy()
        values = column.values.to_numpy()
        return lambda i: values[offsets[i] : offsets[i + 1]]
    if _is_number(column.type) and not column.null_count:
        return column.to_numpy().__getitem__
    if pa.types.is_binary(column.type) and not column.null_count:
        _, starts, data = column.buffers()
        offsets = np.frombuffer(starts, np.int32)[column.offset :]
        values = np.frombuffer(data or b"", np.uint8)
        return lambda i: values[offsets[i] : offsets[i + 1]]
    return lambda i: column[i].as_py()


def _is_number(type_: pa.DataType) -> bool:
    return pa.types.is_integer(type_) or pa.types.is_floating(type_)


def _is_list(type_: pa.DataType) -> bool:
    return pa.types.is_list(type_) or pa.types.is_large_list(type_)


# ---- a split -----------------------------------------------------------------------------------------------------------

ROWS = "rows.arrow"
STATS = "facts.json"
# In STATS
SUMS = ("source_rows", "tokens", "targets", "rows_cut", "tokens_cut", "without_target", "unknown_tokens", "examples")
SUMS += ("rows_dropped",)  # longer than max_length, if long_rows is drop; `tokens_cut` has their tokens
# Files with a number for each row: tokens; a hash of the content (of each document, if packed); for each raw row
# whether it belongs to the split, and was not dropped.
ARRAYS = {"lengths": np.int32, "hashes": np.uint64, "kept": np.bool_}
MANY = 5_000_000  # search at most this many training rows per source for validation rows


@dataclass
class Split:
    """Prepared rows of one split on disk. Only requested rows are read."""

    folder: Path
    stats: dict  # facts.json: examples, tokens, targets, truncated rows, hashes of rows and tokenizer, blocks

    quotas = None  # one source: every row is drawn once per epoch

    @classmethod
    def open(cls, folder: Path) -> "Split":
        """Return the prepared rows of a folder."""
        return cls(folder, json.loads((folder / STATS).read_text()))

    def __len__(self) -> int:
        return self.stats["examples"]

    def __reduce__(self) -> tuple:
        return Split, (self.folder, self.stats)  # a dataloader worker opens its own files

    def segments(self) -> list[tuple[str, int, "Split"]]:
        """Return (source name, id of its first row, its split) of each source."""
        return [("", 0, self)]

    def longest(self, count: int) -> np.ndarray:
        """Return the ids of the `count` longest rows among the first million."""
        return np.argsort(-self.lengths[:1_000_000].astype(np.int64), kind="stable")[:count]

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row, by row id, memory-mapped."""
        return self.array("lengths")

    def array(self, name: str) -> np.ndarray:
        """Return one of `ARRAYS`, memory-mapped."""
        return np.asarray(np.memmap(self.folder / name, ARRAYS[name], "r"))  # plain arrays are indexed faster

    def features(self):
        """Return the `datasets.Features` of the rows."""
        from datasets import Features

        return Features.from_arrow_schema(self._file.schema)

    @cached_property
    def _file(self) -> pa.RecordBatchFileReader:
        return pa.ipc.open_file(pa.memory_map(str(self.folder / ROWS)))

    @cached_property
    def _starts(self) -> np.ndarray:
        """Id of the first row of each block, and last the number of rows."""
        return np.cumsum([0, *self.stats["blocks"]])

    @cached_property
    def _columns(self) -> dict[int, list]:
        """(name, function that returns the value of row i) of each column, of the blocks that were read."""
        return {}

    def rows(self, ids: np.ndarray) -> list[dict]:
        """Return the rows with the given ids, in the order of `ids`; see `column_readers` for the types of values."""
        blocks = np.searchsorted(self._starts, ids, side="right") - 1
        rows_in_block = ids - self._starts[blocks]
        rows = []
        for block, i in zip(blocks.tolist(), rows_in_block.tolist(), strict=True):
            if block not in self._columns:
                self._columns[block] = column_readers(self._file.get_batch(block))
            rows.append({name: read(i) for name, read in self._columns[block]})
        return rows

    def values(self, column: str) -> np.ndarray:
        """Return the numbers in a column of all rows; those of a list one after the other."""
        values = self._file.read_all()[column]
        if pa.types.is_nested(values.type):
            values = pc.list_flatten(values)
        return values.to_numpy()


# ---- statistics ------------------------------------------------------------------------------------------------------


def format_stats(stats: dict, unit: str = "tokens") -> str:
    """Format the number of rows, tokens (or what `unit` names) and targets of a split as one line of text."""
    if stats["examples"] is None:
        return "a stream"
    source_rows = stats["source_rows"] - stats["rows_dropped"]
    made = "packed" if stats["examples"] < source_rows else "made"  # of long texts, or turns, several rows
    packed = f" {made} from {source_rows:,}" if stats["examples"] != source_rows else ""
    counted = f", {stats['tokens']:,} {unit}" if stats["tokens"] != stats["examples"] else ""
    targets = f", {stats['targets']:,} targets" if stats["targets"] else ""  # of computed rows they are not counted
    return f"{stats['examples']:,} rows{packed}{counted}{targets}"


def holds_chats(split, task) -> bool:
    """Return whether a source of a split has rows that are chats."""
    if split.stats["examples"] is None:  # a stream, whose columns this process has inspected
        return task.reads_chats
    return any(part.stats.get("chats") for _, _, part in split.segments())


def describe_rows(splits: dict) -> str:
    """Return how the rows of the splits are read, source by source if they differ; empty if the task does not say."""
    formats = {}
    for name, split in splits.items():
        parts = split.segments() or [("", 0, split)]  # a stream has none
        for source, _, part in parts:
            formats[f"{name} {source}".strip()] = part.stats.get("row_description", "")
    if len({*formats.values()}) == 1:
        return next(iter(formats.values()))
    return "; ".join(f"{name}: {text}" for name, text in formats.items() if text)


def task_stats(task) -> dict:
    """Return label names and a hash of the tokenizer, which a checkpoint records."""
    stats = {}
    labels = getattr(task, "labels", None)
    tokenizer = getattr(task, "tokenizer", None)
    if labels:
        stats["labels"] = list(labels)
    if tokenizer is not None:
        special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
        text = repr((getattr(task, "tokenizer_text", None), special, getattr(tokenizer, "chat_template", None)))
        stats["tokenizer_files"] = xxhash.xxh3_128_hexdigest(text.encode())
    return stats


def data_notes(splits: dict) -> list[str]:
    """Return notes on truncated rows, rows without a target, tokens that the tokenizer does not know, what was counted of
    rows, and validation rows that are also in the training data."""
    notes = []
    for name, split in splits.items():
        stats = split.stats
        if stats["examples"] is None:  # a stream
            continue
        if long := stats["rows_cut"] + stats["rows_dropped"]:
            share = stats["tokens_cut"] / (stats["tokens"] + stats["tokens_cut"])
            done = "they are left out, which" if stats["rows_dropped"] else "truncation"
            text = f"{long:,} rows were longer than max_length: {done} removed {share:.1%} of all tokens"
            notes.append(f"{name} data: {text}")
        if stats["without_target"]:
            text = f"{stats['without_target']:,} of {stats['examples']:,} rows have no target and are not trained on"
            notes.append(f"{name} data: {text}")
        if stats["unknown_tokens"]:
            share = stats["unknown_tokens"] / stats["tokens"]
            text = f"{stats['unknown_tokens']:,} tokens ({share:.2%}) are the unknown token of the tokenizer"
            notes.append(f"{name} data: {text}: it has no token for these words or characters, so they are lost")
        notes += [f"{name} data: {number:,} {kind} (first: {first})" for kind, (first, number) in counted_rows(split)]
    both, checked = count_repeated_rows(splits)
    if both:
        notes.append(f"validation data: {both:,} of {checked:,} examples checked are also in the training data")
    return notes


def counted_rows(split) -> list[tuple[str, tuple[str, int]]]:
    """Return (what is said of rows, (the first one, how many)) of what was counted in each source of a split."""
    parts = split.segments() if split.stats["examples"] is not None else []
    return [each for _, _, part in parts for each in part.stats.get("counted", {}).items()]


def count_repeated_rows(splits: dict) -> tuple[int, int]:
    """Return (validation examples that are also in the training data, validation examples checked)."""
    if not {"train", "validation"} <= splits.keys() or not splits["train"].segments():  # a stream has none
        return 0, 0
    validation = [part.array("hashes")[:MANY] for _, _, part in splits["validation"].segments()]
    checked = np.concatenate(validation)[: MANY // 50]
    in_training = []
    for _, _, part in splits["train"].segments():
        hashes = part.array("hashes")[:MANY]
        is_checked = pc.is_in(pa.array(hashes), pa.array(checked)).to_numpy(zero_copy_only=False)
        in_training.append(np.unique(hashes[is_checked]))
    return int(np.isin(checked, np.concatenate(in_training)).sum()), len(checked)
