"""Prepared rows of one split: memory-mapped, read by row id; their statistics as text.

Tests: tests/data/test_dataset.py, tests/data/test_prepare.py and tests/data/test_bad_rows.py.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from src.config.schema import RunConfig
from src.data.arrow_columns import column_readers
from src.data.batch_plan import sizes_of_run

STATS = "facts.json"
# Files with a number for each row: tokens; a hash of the content (of each document, if packed); for each raw row
# whether it belongs to the split.
ARRAYS = {"lengths": np.int32, "hashes": np.uint64, "kept": np.bool_}
MANY = 5_000_000  # search at most this many training rows per source for validation rows


@dataclass
class Split:
    """Prepared rows of one split on disk. Only requested rows are read."""

    folder: Path
    stats: dict  # facts.json: examples, tokens, targets, truncated rows, hashes of rows and tokenizer, files, parts

    def __post_init__(self):
        self._parts: dict[str, list[pa.RecordBatch]] = {}
        self._readers: dict[int, list] = {}

    quotas = None  # one source: every row is drawn once per epoch

    def __len__(self) -> int:
        return self.stats["examples"]

    def __getstate__(self) -> dict:
        # A dataloader worker opens its own files.
        return {"folder": self.folder, "stats": self.stats, "_parts": {}, "_readers": {}}

    def epoch_at(self, step: int, cfg: RunConfig) -> float:
        """Return the number of epochs finished after `step` steps."""
        return sizes_of_run(cfg, len(self)).epochs_of(step)

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
        return np.memmap(self.folder / name, ARRAYS[name], "r")

    @cached_property
    def _starts(self) -> np.ndarray:
        """Id of the first row of each block, and last the number of rows."""
        return np.cumsum([0, *(rows for _, blocks in self.stats["parts"] for rows in blocks)])

    @cached_property
    def _blocks(self) -> list[tuple[str, int]]:
        """(file, number of the block in this file) of each block."""
        return [(file, i) for file, blocks in self.stats["parts"] for i in range(len(blocks))]

    def features(self):
        """Return the `datasets.Features` of the rows."""
        from datasets import Features

        return Features.from_arrow_schema(_open(self.folder / self.stats["parts"][0][0]).schema)

    def rows(self, ids: np.ndarray) -> list[dict]:
        """Return the rows with the given ids, in the order of `ids`; see `column_readers` for the types of values."""
        blocks = np.searchsorted(self._starts, ids, side="right") - 1
        positions = (ids - self._starts[blocks]).tolist()
        found = []
        for block, i in zip(blocks.tolist(), positions, strict=True):
            columns = self._readers.get(block) or self._open_block(block)
            found.append({name: read(i) for name, read in columns})
        return found

    def values(self, column: str) -> np.ndarray:
        """Return the numbers in a column of all rows; those of a list one after the other."""
        parts = [_open(self.folder / file)[column] for file, _ in self.stats["parts"]]
        values = pa.chunked_array([chunk for part in parts for chunk in part.chunks])
        return (pc.list_flatten(values) if pa.types.is_nested(values.type) else values).to_numpy()

    def _open_block(self, block: int) -> list:
        """Return (name, function that returns the value of row i) of each column of a block."""
        file, i = self._blocks[block]
        if file not in self._parts:
            self._parts[file] = _open(self.folder / file).to_batches()
        self._readers[block] = columns = column_readers(self._parts[file][i])
        return columns


def _open(file: Path) -> pa.Table:
    return pa.ipc.open_stream(pa.memory_map(str(file))).read_all()


# ---- statistics: add your own here ------------------------------------------------------------------------------------


def format_stats(stats: dict, unit: str = "tokens") -> str:
    """Format the number of rows, tokens (or what `unit` names) and targets of a split as one line of text."""
    if stats["examples"] is None:
        return "a stream"
    packed = f" packed from {stats['source_rows']:,}" if stats["examples"] != stats["source_rows"] else ""
    counted = f", {stats['tokens']:,} {unit}" if stats["tokens"] != stats["examples"] else ""
    return f"{stats['examples']:,} rows{packed}{counted}, {stats['targets']:,} targets"


def task_stats(task) -> dict:
    """Return label names and a hash of the tokenizer, which a checkpoint records."""
    found, tokenizer = {}, getattr(task, "tokenizer", None)
    if labels := getattr(task, "labels", None):
        found["labels"] = list(labels)
    if tokenizer is not None:
        special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
        text = repr((getattr(task, "tokenizer_text", None), special, getattr(tokenizer, "chat_template", None)))
        found["tokenizer_files"] = xxhash.xxh3_128_hexdigest(text.encode())
    return found


def data_notes(splits: dict) -> list[str]:
    """Return notes on truncated rows, rows without a target, and validation rows that are also in the training data."""
    found = []
    for name, split in splits.items():
        stats = split.stats
        if stats["examples"] is None:
            continue
        if stats["rows_cut"]:
            share = stats["tokens_cut"] / (stats["tokens"] + stats["tokens_cut"])
            text = (
                f"{stats['rows_cut']:,} rows were longer than max_length: truncation removed {share:.1%} of all tokens"
            )
            found.append(f"{name} data: {text}")
        if stats["without_target"]:
            text = f"{stats['without_target']:,} of {stats['examples']:,} rows have no target and are not trained on"
            found.append(f"{name} data: {text}")
    if (both := repeated(splits)) and both[0]:
        found.append(f"validation data: {both[0]:,} of {both[1]:,} examples checked are also in the training data")
    return found


def repeated(splits: dict) -> tuple[int, int] | None:
    """Return (validation examples that are also in the training data, validation examples checked).

    Return None if a split is missing or the training data is a stream."""
    if not {"train", "validation"} <= splits.keys() or not splits["train"].segments():
        return None
    hashes = {
        name: np.concatenate([part.array("hashes")[:MANY] for _, _, part in splits[name].segments()])
        for name in ("train", "validation")
    }
    searched = hashes["validation"][: MANY // 50]
    return int(np.isin(searched, hashes["train"]).sum()), len(searched)
