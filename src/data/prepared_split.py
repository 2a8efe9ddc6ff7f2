"""Prepared rows of one split: memory-mapped, read by row id.

Tests: tests/data/test_dataset.py and tests/data/test_preprocessing.py.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from src.config.schema import RunConfig
from src.data.arrow_columns import column_readers
from src.data.step_sizes import sizes_of_run


@dataclass
class Split:
    """Prepared rows of one split on disk. Only requested rows are read."""

    folder: Path
    stats: dict  # facts.json: examples, tokens, targets, truncated rows, hashes of rows and tokenizer, files, pieces

    def __post_init__(self):
        self._pieces: dict[str, list[pa.RecordBatch]] = {}
        self._readers: dict[int, list] = {}

    quotas = None  # one source: every row is drawn once per epoch

    def __len__(self) -> int:
        return self.stats["examples"]

    def __getstate__(self) -> dict:
        # A dataloader worker opens its own files.
        return {"folder": self.folder, "stats": self.stats, "_pieces": {}, "_readers": {}}

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
        return np.load(self.folder / "lengths.npy", mmap_mode="r")

    @cached_property
    def _starts(self) -> np.ndarray:
        """Id of the first row of each block, and last the number of rows."""
        return np.cumsum([0, *(rows for _, blocks in self.stats["pieces"] for rows in blocks)])

    @cached_property
    def _blocks(self) -> list[tuple[str, int]]:
        """(piece file, number of the block in this piece) of each block."""
        return [(file, i) for file, blocks in self.stats["pieces"] for i in range(len(blocks))]

    def features(self):
        """Return the `datasets.Features` of the rows."""
        from datasets import Features

        return Features.from_arrow_schema(_open(self.folder / self.stats["pieces"][0][0]).schema)

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
        pieces = [_open(self.folder / file)[column] for file, _ in self.stats["pieces"]]
        found = pa.chunked_array([chunk for piece in pieces for chunk in piece.chunks])
        return (pc.list_flatten(found) if pa.types.is_nested(found.type) else found).to_numpy()

    def _open_block(self, block: int) -> list:
        """Return (name, function that returns the value of row i) of each column of a block."""
        file, i = self._blocks[block]
        if file not in self._pieces:
            self._pieces[file] = _open(self.folder / file).to_batches()
        self._readers[block] = columns = column_readers(self._pieces[file][i])
        return columns


def _open(file: Path) -> pa.Table:
    return pa.ipc.open_stream(pa.memory_map(str(file))).read_all()
