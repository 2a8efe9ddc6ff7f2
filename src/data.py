"""From the run file to rows read by id: fetched once, prepared once by all processes, memory-mapped by each.

Leave alone. Guarded by tests/test_data.py, tests/test_bad_input.py and tests/conformance/. All of it works before a
process group exists, so no collective ever waits for a download or a tokenizer. `python -m src.data --config X`, or
make data, does only this, on a machine without an accelerator if you like.
"""

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from src import sources
from src.fields import RunConfig
from src.inputs import UsageError, warn
from src.prepare import FACTS, prepared
from src.tasks import Task
from src.together import Crew

MANY = 5_000_000  # rows of training data among which those of the validation data are looked for


@dataclass
class Split:
    """Prepared rows of one split, on disk; only what is asked for is read."""

    folder: Path
    facts: (
        dict  # examples, tokens, targets, rows and tokens cut off, hashes of rows and tokenizer, files and their blocks
    )

    def __post_init__(self):
        self._views: dict[int, dict] = {}

    def __len__(self) -> int:
        return self.facts["examples"]

    def __getstate__(self) -> dict:
        return {"folder": self.folder, "facts": self.facts, "_views": {}}  # a loader's process opens files of its own

    @cached_property
    def lengths(self) -> np.ndarray:
        """Memory-mapped, indexed by id."""
        return np.load(self.folder / "lengths.npy", mmap_mode="r")

    @cached_property
    def _starts(self) -> np.ndarray:
        """The first row of each block of each piece, and the number of rows."""
        return np.cumsum([0, *(rows for _, blocks in self.facts["pieces"] for rows in blocks)])

    @cached_property
    def _tables(self) -> list:
        """Return (piece, number in it) of each block."""
        return [(file, i) for file, blocks in self.facts["pieces"] for i in range(len(blocks))]

    def features(self):
        """Return the features of the rows."""
        from datasets import Features

        return Features.from_arrow_schema(_open(self.folder / self.facts["pieces"][0][0]).schema)

    def rows(self, ids: np.ndarray) -> list[dict]:
        """Return the rows of `ids` in that order: lists and numbers as numpy, without a copy, anything else as Python has it."""
        blocks = np.searchsorted(self._starts, ids, side="right") - 1
        inside = (ids - self._starts[blocks]).tolist()
        found = []
        for block, i in zip(blocks.tolist(), inside, strict=True):
            columns = self._views.get(block) or self._view(block)
            found.append({name: take(i) for name, take in columns})
        return found

    def _view(self, block: int) -> list:
        """Return (name, function from row to value) of each column of a block."""
        file, i = self._tables[block]
        if file not in self._views:
            self._views[file] = _open(self.folder / file).to_batches()
        batch = self._views[file][i]
        hidden = ("length", "targets", "cut")
        columns = [(name, _taker(column)) for name, column in zip(batch.schema.names, batch.columns, strict=True)]
        self._views[block] = columns = [(name, take) for name, take in columns if name not in hidden]
        return columns


def _open(file: Path) -> pa.Table:
    return pa.ipc.open_stream(pa.memory_map(str(file))).read_all()


def _taker(column):
    """Return a function from the number of a row to its value in an Arrow column."""
    if pa.types.is_list(column.type) and _plain(column.type.value_type):
        offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
        return lambda i: values[offsets[i] : offsets[i + 1]]
    if _plain(column.type) and not column.null_count:
        return column.to_numpy().__getitem__
    return lambda i: column[i].as_py()


def _plain(kind) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def load(run: RunConfig, task: Task, wanted=("train", "validation")) -> dict[str, Split]:
    """Let the task read tokenizer and configuration, and return the prepared splits that the run file names.

    Without validation data the key is missing. Everything is looked up before anything is fetched or prepared."""
    crew = Crew(sources.cache_root(run))
    with crew.working():
        task.load()
        return load_splits(run, task, crew, wanted)


def load_splits(run: RunConfig, task: Task, crew: Crew, wanted=("train", "validation")) -> dict[str, Split]:
    """Return the prepared splits that the run file names, for a task that has read its tokenizer."""
    import datasets

    datasets.disable_progress_bars()  # one process of many prepares, so a terminal would show bars in between
    found = {split: sources.find(run, split) for split in wanted}
    found = {split: source for split, source in found.items() if source}
    _overlap(found)
    for source in found.values():
        source.fetch(run, crew)
    splits = {split: _opened(run, task, split, source, crew) for split, source in found.items()}
    splits = {name: split for name, split in splits.items() if split}
    for name in wanted[:1]:
        if name not in splits:
            raise UsageError(f"no {name} data: give --{name}_file, or a dataset with a {name} split")
    return splits


def _opened(run: RunConfig, task: Task, split: str, source: sources.Source, crew: Crew) -> Split | None:
    folder = prepared(run, task, split, source, crew)
    facts = json.loads((folder / FACTS).read_text())
    if not facts["examples"]:
        return None
    opened = Split(folder, facts)
    task.opened(opened.features())
    return opened


def _overlap(found: dict[str, sources.Source]) -> None:
    """Warn of files that are both trained and evaluated on."""
    files = [{os.path.realpath(file) for file in source.files} for source in found.values() if source.builder]
    if len(files) == 2 and (both := sorted(files[0] & files[1])):
        warn(f"validation_file: {', '.join(both[:3])} is training data too: the evaluation says nothing of other data")


def repeated(splits: dict[str, Split]) -> tuple[int, int] | None:
    """Return (how many of the validation rows are training rows too, of how many that were looked for), or None."""
    if not {"train", "validation"} <= splits.keys():
        return None
    one, other = (np.load(splits[name].folder / "hashes.npy", mmap_mode="r") for name in ("validation", "train"))
    one = one[: MANY // 10]
    return int(np.isin(one, other[:MANY]).sum()), len(one)
