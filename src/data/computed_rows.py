"""Rows that are computed from their ids when they are read, instead of prepared on disk: `Rows` of a file in samples/.

Tests: tests/data/test_computed_rows.py, tests/tasks/test_forking_example.py.
"""

import hashlib
import inspect
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from src.config.errors import UsageError, errors_of
from src.data.prepared_split import ARRAYS, SUMS, Split
from src.data.row_order import derive_seed
from src.storage.cache_folder import depends_on, shared_sample_code

if TYPE_CHECKING:
    from datasets import Features

    from src.data.sources import Source

AT_ONCE = 1_000_000  # rows whose lengths are computed together
CHECKED = 4  # rows that are computed twice before a run


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
        self.rows, self.count = rows, count

    def __getitem__(self, ids: Any) -> np.ndarray:
        chosen = np.arange(self.count)[ids] if isinstance(ids, slice) else np.asarray(ids)
        return np.asarray(self.rows.lengths(chosen), np.int64)


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
        return np.zeros(0, ARRAYS[name])

    def features(self) -> "Features | None":
        return self.computed.features()

    def rows(self, ids: np.ndarray) -> list[dict]:
        rows = self.computed.rows(ids)
        if len(rows) != len(ids):
            raise UsageError(
                f"{self.folder}: rows() returned {len(rows)} rows for {len(ids)} ids: return one for each id"
            )
        return rows

    def values(self, column: str) -> np.ndarray:
        blocks = (np.arange(i, min(i + AT_ONCE, len(self))) for i in range(0, len(self), AT_ONCE))
        return np.concatenate([np.ravel(row[column]) for ids in blocks for row in self.rows(ids)])


def open_computed_rows(source: "Source") -> ComputedSplit | None:
    """Return the computed rows of a source, or None if there is no such split.

    Raise UsageError if a row is another one when it is computed again, or beside other rows."""
    name = source.dataset_split if source.split == "train" else None
    computed = source.computed(name or source.split)
    file = Path(inspect.getfile(type(computed)))
    with errors_of(f"{file}: count()"):
        count = int(computed.count())
    if not count:
        return None
    with errors_of(f"{file}: lengths()"):
        lengths = [LengthById(computed, count)[i : i + AT_ONCE] for i in range(0, count, AT_ONCE)]
    tokens = sum(int(part.sum()) for part in lengths)
    stats: dict[str, Any] = dict.fromkeys(SUMS, 0) | {"examples": count, "source_rows": count, "tokens": tokens}
    longest = max(int(part.max()) for part in lengths)
    stats |= {"longest": longest, "splits": [source.split], "rows": content_key(computed, count, lengths)}
    split = ComputedSplit(computed, file, stats)
    _check_rows(split)
    return split


def content_key(computed: ComputedRows, count: int, lengths: list[np.ndarray]) -> str:
    """Return a hash of what decides the rows: code of the file and of its base classes, split, count, `depends_on`."""
    classes = [kind for kind in type(computed).__mro__ if kind not in (ComputedRows, object)]
    files = sorted({Path(inspect.getfile(kind)) for kind in classes})
    code = shared_sample_code() + b"".join(path.read_bytes() for path in files)
    of_lengths = xxhash.xxh3_128()
    for part in lengths:
        of_lengths.update(part.tobytes())
    depends = depends_on(inspect.getmodule(type(computed)))
    parts = (hashlib.sha256(code).hexdigest(), computed.split, count, of_lengths.hexdigest(), depends)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _check_rows(split: ComputedSplit) -> None:
    """Raise UsageError unless the first rows are the same together and alone."""
    ids = np.arange(min(len(split), CHECKED))
    together = split.rows(ids)
    for row_id in ids[::-1]:
        (alone,) = split.rows(ids[row_id : row_id + 1])
        first = together[row_id]
        names = [name for name in first | alone if not _equal(first.get(name), alone.get(name))]
        if names:
            raise UsageError(
                f"{split.folder}: rows() returns another {', '.join(names)} for row {row_id} of {split.computed.split} the "
                "second time: a row must be a function of its id; draw its random numbers from self.generator(id)"
            )


def _equal(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
