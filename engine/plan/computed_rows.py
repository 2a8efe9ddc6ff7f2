"""Rows that are computed from their ids when they are read, instead of prepared on disk: `Rows` of a file in samples/.

Tests: tests/engine/plan/test_computed_rows.py, tests/project/test_forking_example.py.
"""

import hashlib
import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from engine.config.errors import UsageError, reason_of
from engine.plan.seeding import derive_seed
from engine.rows.prepared_split import SUMS, Split
from engine.storage.cache_folder import depends_on, shared_sample_files
from engine.storage.code_hash import code_hash

if TYPE_CHECKING:
    from datasets import Features

    from engine.rows.sources import Source

AT_ONCE = 1_000_000  # rows whose lengths are computed together
HASHED = 16  # rows of each split whose values are in the identity of a run
CHECKED = 4  # first rows that are computed twice before a run, besides the last one


class ComputedRows:
    """Base class of a class `Rows` in samples/NAME.py: `dataset_name: NAME` then trains on rows computed from their ids.

    A row is what `collate` of the task gets: it is not encoded. It may depend on the split, on its id, and on what
    `depends_on` of the file returns, on nothing else: any process computes any row, at any time, and again after a
    resume. A resumed run is refused if the code of the file, or what it depends on, has changed."""

    def __init__(self, split: str):
        """`split` is "train" or "validation"."""
        self.split = split

    def count(self) -> int:
        """Return the number of rows; 0 if there is no such split."""
        raise NotImplementedError

    def rows(self, ids: np.ndarray) -> list[dict]:
        """Return the rows with these ids (0 … count−1), in this order."""
        raise NotImplementedError

    # ---- what only some classes define -------------------------------------------------------------------------------

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Return the length (tokens, or what `unit` of the task names) of each of these rows.

        Rows of similar length are padded together. All rows are asked for before a run, so this has to be fast."""
        return np.ones(len(ids), np.int64)

    def features(self) -> "Features | None":
        """Return the features of the rows, if `on_prepared` of the task needs them (the names of labels)."""
        return None

    # ---- not to be defined -------------------------------------------------------------------------------------------

    def generator(self, row_id: int) -> np.random.Generator:
        """Return a generator that depends on the name of the file, the split and the id of a row alone."""
        return np.random.default_rng(derive_seed("computed row", type(self).__module__, self.split, int(row_id)))


class LengthById:
    """The lengths of computed rows, indexed like an array."""

    def __init__(self, rows: ComputedRows, count: int):
        self.rows = rows
        self.count = count

    def __getitem__(self, ids: Any) -> np.ndarray:
        chosen = np.arange(self.count)[ids] if isinstance(ids, slice) else np.asarray(ids)
        lengths = np.asarray(self.rows.lengths(chosen))
        if lengths.shape != chosen.shape or lengths.dtype.kind not in "iu" or lengths.min(initial=1) < 1:
            raise UsageError(
                f"{file_of(type(self.rows))}: lengths() returned {shown(lengths)} for {len(chosen)} ids: return an array of one "
                "integer for each id, 1 or more"
            )
        return lengths.astype(np.int64, copy=False)


class ComputedSplit(Split):
    """Computed rows with the interface of prepared ones."""

    def __init__(self, computed: ComputedRows, file: Path, stats: dict):
        super().__init__(file, stats)
        self.computed = computed

    def __reduce__(self) -> tuple:
        return ComputedSplit, (self.computed, self.folder, self.stats)

    @cached_property
    def lengths(self) -> Any:
        """Return the length of each row, indexed by row ids."""
        return LengthById(self.computed, len(self))

    def array(self, name: str) -> np.ndarray:
        """Return an empty array: there are no hashes that would find rows that are in both splits."""
        return np.zeros(0, np.uint64)

    def features(self) -> "Features | None":
        return self.computed.features()

    def rows(self, ids: np.ndarray) -> list[dict]:
        rows = self.computed.rows(ids)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise UsageError(f"{self.folder}: rows() returned {shown(rows)}: return a list of one dict for each id")
        if len(rows) != len(ids):
            raise UsageError(
                f"{self.folder}: rows() returned {len(rows)} rows for {len(ids)} ids: return one for each id"
            )
        return rows

    def values(self, column: str) -> np.ndarray:
        """Return the numbers in a column of all rows; those of a list one after the other."""
        values = []
        for start in range(0, len(self), AT_ONCE):
            ids = np.arange(start, min(start + AT_ONCE, len(self)))
            values += [np.ravel(row[column]) for row in self.rows(ids)]
        return np.concatenate(values)


def file_of(rows: type[ComputedRows]) -> Path:
    return Path(inspect.getfile(rows))


def shown(value: Any) -> str:
    """Return the type of a value and its beginning, for messages."""
    text = np.array2string(value, threshold=6) if isinstance(value, np.ndarray) else repr(value)
    return f"{type(value).__name__} {' '.join(text.split())[:80]}"


@contextmanager
def errors_in(file: Path, method: str) -> Iterator[None]:
    """Within, an exception of the user's code becomes a UsageError with file, line and method; a UsageError stays."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        place = f"{file}, line {lines[-1]}" if lines else file
        raise UsageError(f"{place}: {method}: {reason_of(error)}") from error


def open_computed_rows(source: "Source") -> ComputedSplit | None:
    """Return the computed rows of a source, or None if there is no such split.

    Raise UsageError for what `Rows` may not return, and if a row is another one when it is computed again, beside other
    rows or by another instance of the class, as in another process or after a resume."""
    name = (source.dataset_split if source.split == "train" else None) or source.split
    file = file_of(source.computed)
    with errors_in(file, "__init__()"):
        computed = source.computed(name)
        again = source.computed(name)
    computed.split = name  # an __init__ of the user may not call that of the base class
    again.split = name
    count = _count(computed, file)
    if _count(again, file) != count:
        raise UsageError(f"{file}: count() returns {count} for {name}, and another number the second time")
    if not count:
        return None
    with errors_in(file, "lengths()"):
        lengths = [LengthById(computed, count)[i : i + AT_ONCE] for i in range(0, count, AT_ONCE)]
    stats: dict[str, Any] = dict.fromkeys(SUMS, 0)
    stats |= {
        "examples": count,
        "source_rows": count,
        "tokens": sum(int(block.sum()) for block in lengths),
        "longest": max(int(block.max()) for block in lengths),
        "splits": [source.split],
    }
    split = ComputedSplit(computed, file, stats)
    _check_rows(split, ComputedSplit(again, file, stats))
    stats["rows"] = content_key(split, lengths)
    return split


def _count(computed: ComputedRows, file: Path) -> int:
    with errors_in(file, "count()"):
        count = computed.count()
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 0:
        raise UsageError(f"{file}: count() returned {shown(count)}: return the number of rows, an integer, 0 or more")
    return int(count)


def content_key(split: ComputedSplit, lengths: list[np.ndarray]) -> str:
    """Return a hash of what decides the rows: code of the file and of its base classes, split, count, `depends_on`; and of
    some rows, which may depend on more than the file says."""
    computed = split.computed
    some = split.rows(np.unique(np.linspace(0, len(split) - 1, HASHED).astype(np.int64)))
    classes = [cls for cls in type(computed).__mro__ if cls not in (ComputedRows, object)]
    code = code_hash([*shared_sample_files(), *{Path(inspect.getfile(cls)) for cls in classes}])
    of_lengths = xxhash.xxh3_128()
    for block in lengths:
        of_lengths.update(block.tobytes())
    depends = depends_on(inspect.getmodule(type(computed)))
    rows = [(name, _summary(row[name])) for row in some for name in sorted(row)]
    parts = (code, computed.split, len(split), of_lengths.hexdigest(), depends, rows)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _summary(value: Any) -> str:
    """Return a text for a value of a row. Of real numbers it has three digits of a sum: processors round differently."""
    array = np.asarray(value)
    if array.dtype.kind == "f":
        return f"{array.shape} {np.abs(np.nan_to_num(array)).ravel() @ np.linspace(1, 2, array.size):.3g}"
    return f"{array.shape} {array.tobytes().hex() if array.dtype.kind in 'biuSU' else type(value).__name__}"


def _check_rows(split: ComputedSplit, again: ComputedSplit) -> None:
    """Raise UsageError unless the first rows and the last one are the same together, and alone from `again`."""
    file = split.folder
    name = split.computed.split
    ids = np.unique([*range(min(len(split), CHECKED)), len(split) - 1])
    with errors_in(file, "rows()"):
        together = split.rows(ids)
        alone = [again.rows(np.array([row_id]))[0] for row_id in ids[::-1]][::-1]
    for row_id, first, other in zip(ids, together, alone, strict=True):
        columns = [column for column in first | other if not _equal(first.get(column), other.get(column))]
        if columns:
            raise UsageError(
                f"{file}: rows() returns another {', '.join(columns)} for row {row_id} of {name} the second time, alone and "
                "from a new instance of the class: a row must be a function of its id; draw its random numbers from "
                "self.generator(id)"
            )
    with errors_in(file, "lengths()"):
        lengths = split.lengths[ids]
        reversed_lengths = again.lengths[ids[::-1]]
    if not np.array_equal(lengths, reversed_lengths[::-1]):
        raise UsageError(
            f"{file}: lengths() returns {lengths.tolist()} for the rows {ids.tolist()} of {name}, and "
            f"{reversed_lengths.tolist()} for the same rows in reverse: a length must be a function of the id"
        )


def _equal(one: Any, other: Any) -> bool:
    one = np.asarray(one)
    other = np.asarray(other)
    return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
