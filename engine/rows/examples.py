"""Raw rows of a source: those of files by engine/rows/read.py; folders of media and saved datasets by `datasets`.

Tests: tests/engine/rows/test_bad_rows.py and tests/engine/rows/test_read.py.
"""

import dataclasses
import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from engine.config.errors import DISK_FULL, UsageError, one_line
from engine.config.run_config import RunConfig
from engine.rows import file_parts, read, read_tables
from engine.rows.columns import check_columns, columns_by_name
from engine.rows.file_parts import File, Part, Place, Row
from engine.rows.prepared_split import MEDIA
from engine.rows.sources import Source, named_files, warn_of_unread_media
from engine.storage.cache_folder import cache_root

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

FIRST_ROWS = 1000  # where names of columns, and first values, are looked for
MEDIA_FILE = 100_000  # bytes of an image file, assumed: rows may hold only its path
Block = tuple[Part, ...]


class Examples:
    """Raw rows of a split, as `inspect_columns` of a task sees them, and in blocks to encode.

    `column_names` are those of the first rows; `features` has the `datasets` features of columns that have types (Parquet,
    Arrow, saved datasets), such as the names of a ClassLabel."""

    def __init__(self, source: Source, splits: Sequence[str] = ()):
        self.source = source
        self.splits = tuple(splits)  # names of all splits of a dataset given by name
        self.named: dict[str, str] = {}  # name that a task sees -> column, as the run file says

    # ---- what a class for a kind of source defines -------------------------------------------------------------------

    @property
    def raw_names(self) -> list[str]:
        """The names of the columns of the first rows, as the data has them."""
        raise NotImplementedError

    @property
    def raw_features(self) -> dict[str, Any]:
        """The features of columns that have types, as the data names them."""
        raise NotImplementedError

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[Part]:
        """Yield the parts of the rows, in order, to read these columns of the data (None: all)."""
        raise NotImplementedError

    def read_part(self, part: Part, columns: Sequence[str] | None = None) -> list[Row]:
        """Return the rows of a part with these columns of the data, None where a row has none."""
        raise NotImplementedError

    def size(self) -> int | None:
        """Return the bytes of all parts, if they are known."""
        raise NotImplementedError

    # ---- names -------------------------------------------------------------------------------------------------------

    def name_columns(self, columns: Mapping[str, str], is_mixed: bool) -> None:
        """Let a task see columns by the names of their parts. Raise UsageError for one that the data lacks."""
        check_columns(self.raw_names, columns, self.source.split, is_mixed)
        self.named = {part: column for part, column in columns.items() if column in self.raw_names}

    def column_of(self, name: str) -> str | None:
        """Return the column that a task sees by this name; None if a part has taken it."""
        if name in self.named:
            return self.named[name]
        return None if name in self.named.values() else name

    def _columns_of(self, names: Sequence[str]) -> list[str]:
        return [column for column in dict.fromkeys(map(self.column_of, names)) if column is not None]

    # ---- what a task asks --------------------------------------------------------------------------------------------

    @property
    def column_names(self) -> list[str]:
        return list(columns_by_name(self.raw_names, self.named))

    @cached_property
    def features(self) -> dict[str, Any]:
        names = columns_by_name(self.raw_names, self.named)
        return {name: self.raw_features[column] for name, column in names.items() if column in self.raw_features}

    def first(self, column: str) -> Any:
        """Return the first value of a column, among the first rows, that is not null, or None."""
        name = self.column_of(column)
        if name not in self.raw_names:
            return None
        return next((row[name] for row in self._first_rows(name) if row.get(name) is not None), None)

    def __getitem__(self, column: str) -> Iterator[Any]:
        """Yield the values of a column, None where a row has none; of a stream, those of the first rows."""
        return (value for _, value in self._values(column))

    def unique(self, column: str, in_lists: bool = False) -> list:
        """Return the values of a column (`in_lists`: in the lists of a column), each once; of a stream, of the first rows.

        Raise UsageError for values of several types, with the places of two rows, and for lists and mappings."""
        values: dict[tuple, Any] = {}
        kinds: dict[str, Place] = {}
        for place, value in self._values(column):
            if in_lists and not isinstance(value, list | None):
                raise UsageError(f"{place}: `{column}` holds {_kind(value)}: give a list for each row")
            for each in value or () if in_lists else (value,):
                kind = _kind(each)
                if kind in ("a list", "a mapping"):
                    raise UsageError(
                        f"{place}: `{column}` holds {kind}, and several labels for one row are not supported: give one name, "
                        "integer or number for each row"
                    )
                if each is not None and kind not in kinds:
                    kinds[kind] = place
                if len(kinds) > 1:
                    other, elsewhere = next(iter(kinds.items()))
                    raise UsageError(
                        f"{place}: `{column}` holds {kind}, and {other} in {elsewhere}: use one type for all rows"
                    )
                values.setdefault((type(each), each), each)
        return list(values.values())

    def _values(self, column: str) -> Iterator[tuple[Place, Any]]:
        for row in self.rows([column]):
            if not row.error:  # of the others, `encode_rows` says it
                yield row.place, row.values.get(column)

    def _first_rows(self, column: str | None) -> list[dict]:
        """Return the first rows, at least with this column of the data."""
        columns = None if column is None else [column]
        rows = (row for part in self.parts(columns) for row in self.read_part(part, columns))
        rows = list(islice(rows, FIRST_ROWS))
        good = [row.values for row in rows if not row.error]
        if rows and not good:
            raise file_parts.bad_rows_error(f"{rows[0].place}: {rows[0].error}", len(rows), len(rows))
        return good

    # ---- all rows ----------------------------------------------------------------------------------------------------

    def read(self, part: Part, names: Sequence[str]) -> list[Row]:
        """Return the rows of a part, with these names that a task sees, None where a row has none.

        Images and sound are as stored."""
        columns = {name: self.column_of(name) for name in names}
        rows = self.read_part(part, self._columns_of(names))
        if not self.named:
            return rows
        return [
            row
            if row.error
            else row._replace(values={name: row.values.get(column or "") for name, column in columns.items()})
            for row in rows
        ]

    def rows(self, names: Sequence[str], file: File | None = None) -> Iterator[Row]:
        """Yield all rows, or those of a file."""
        columns = self._columns_of(names)
        for part in self.parts(columns) if file is None else self.parts_of(file, columns):
            yield from self.read(part, names)

    def parts_of(self, file: File, columns: Sequence[str] | None = None) -> Iterator[Part]:
        """Yield the parts of a file."""
        raise NotImplementedError

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        """Yield the parts that are encoded together: many small ones make one block. They depend on the data alone."""
        block: list[Part] = []
        for part in self.parts(self._columns_of(names)):
            if block and sum(each.size for each in block) + part.size > file_parts.PART:
                yield tuple(block)
                block = []
            block.append(part)
        if block:
            yield tuple(block)

    def decode(self, rows: list[Row], columns: Sequence[str], media: bool) -> list[Row]:
        """Return rows with images and sound (if `media`), and JSON of `datasets`, as objects instead of as stored."""
        from datasets.features.features import decode_nested_example, require_decoding

        features = {name: self.features[name] for name in columns if name in self.features}
        features = {
            name: feature
            for name, feature in features.items()
            if require_decoding(feature) and (media or type(feature).__name__ not in MEDIA)
        }
        if not features:
            return rows

        def decoded(row: Row) -> Row:
            if row.error:
                return row
            try:
                values = {name: decode_nested_example(kind, row.values[name]) for name, kind in features.items()}
            except Exception as error:
                text = f"this row cannot be decoded: {type(error).__name__}: {one_line(error, 200)}"
                return row._replace(error=text)
            return row._replace(values=row.values | values)

        return [decoded(row) for row in rows]


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "a bool"
    if isinstance(value, int | float):
        return "a number"
    names = {str: "a text", list: "a list", dict: "a mapping"}
    return names.get(type(value), type(value).__name__)


class FileExamples(Examples):
    """Rows of files."""

    is_stream = False

    def __init__(self, source: Source, files: Sequence[File], splits: Sequence[str] = ()):
        super().__init__(source, splits)
        self.files = files
        self.data = f"{source.split} data"

    @cached_property
    def _schema(self) -> pa.Schema | None:
        with read_errors(self.source, [self.files[0].name]):
            return read_tables.schema_of_file(self.files[0], self.source.open_file)

    @cached_property
    def raw_names(self) -> list[str]:
        if self._schema is not None:
            return self._schema.names
        return list(dict.fromkeys(name for row in self._untyped_rows for name in row))

    @cached_property
    def _untyped_rows(self) -> list[dict]:
        return super()._first_rows(None)

    def _first_rows(self, column: str | None) -> list[dict]:
        return self._untyped_rows if self._schema is None else super()._first_rows(column)

    def _values(self, column: str) -> Iterator[tuple[Place, Any]]:
        values = super()._values(column)
        return islice(values, FIRST_ROWS) if self.is_stream else values

    @cached_property
    def raw_features(self) -> dict[str, Any]:
        return _features_of_schema(self._schema)

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[Part]:
        parts = chain.from_iterable(self.parts_of(file, columns) for file in self.files)
        if self.source.first_rows is None:
            return parts
        rows = islice((row for part in parts for row in self.read_part(part, columns)), self.source.first_rows)
        return iter([Part(self.files[0], 0, 0, list(rows))])

    def parts_of(self, file: File, columns: Sequence[str] | None = None) -> Iterator[Part]:
        """Yield the parts of a file. Raise UsageError if it has no rows, unless they are streamed."""
        is_empty = True
        with read_errors(self.source, [file.name]):
            self._check_classes(file, columns)
            for part in read.parts_of_file(file, columns, self.source.open_file):
                is_empty = False
                yield part
            if is_empty and not self.is_stream:
                raise ValueError("it is empty")

    def _check_classes(self, file: File, columns: Sequence[str] | None) -> None:
        """Raise UsageError if a file has other classes in one of these columns than the first one."""
        if file is self.files[0] or self._schema is None:
            return
        names = {name: getattr(self.raw_features.get(name), "names", None) for name in columns or ()}
        features = _features_of_schema(read_tables.schema_of_file(file, self.source.open_file))
        for name, classes in names.items():
            others = getattr(features.get(name), "names", None)
            if others != classes:
                raise UsageError(
                    f"{file.name}: `{name}` has the classes {others or 'none'}, in the first file {classes or 'none'}: write them alike"
                )

    def read_part(self, part: Part, columns: Sequence[str] | None = None) -> list[Row]:
        if self.source.first_rows is not None and isinstance(part.content, list):
            return part.content
        with read_errors(self.source, [part.file.name]):
            return read.read_part(part, columns, self.data)

    def size(self) -> int | None:
        if any("://" in file.path or file_parts.is_compressed(file) for file in self.files):
            return None
        return sum(os.path.getsize(file.path) for file in self.files)


def _features_of_schema(schema: pa.Schema | None) -> dict[str, Any]:
    """Return the features of the columns of a file, of those that `datasets` has a type for."""
    from datasets import Features

    features = {}
    for field in schema or pa.schema([]):
        try:
            features |= Features.from_arrow_schema(pa.schema([field], schema and schema.metadata))
        except (ValueError, TypeError, NotImplementedError):  # such as a map
            continue
    return features


class DatasetExamples(Examples):
    """Rows that `datasets` has read."""

    def __init__(self, source: Source, rows: "Dataset", splits: Sequence[str], name: str | None = None):
        super().__init__(source, splits)
        self.table = rows.with_format("arrow")
        self.file = File(name or str(source.name), "arrow", name or str(source.name))

    @property
    def raw_names(self) -> list[str]:
        return self.table.column_names

    @property
    def raw_features(self) -> dict[str, Any]:
        return dict(self.table.features)

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[Part]:
        rows = self._select(columns)
        has_media = any(type(feature).__name__ in MEDIA for feature in rows.features.values())
        count = len(rows)
        size = max(rows.data.nbytes, count * MEDIA_FILE if has_media else 0)
        step = max(1, min(file_parts.PART_ROWS, file_parts.PART * count // max(1, size)))
        for first in range(0, count, step):
            stop = min(first + step, count)
            yield Part(self.file, size * (stop - first) // count, first, range(first, stop))

    def read_part(self, part: Part, columns: Sequence[str] | None = None) -> list[Row]:
        table: pa.Table = self._select(columns)[part.content.start : part.content.stop]
        place = Place(f"{self.source.split} data", self.file.name, "row", 0)
        values = read_tables.rows_of_table(table, columns)
        return [file_parts.make_row(place._replace(number=part.first + i), row) for i, row in enumerate(values)]

    def _select(self, columns: Sequence[str] | None) -> "Dataset":
        """Return the rows with those of these columns that are there; with any one if none is, for their number."""
        if columns is None:
            return self.table
        return self.table.select_columns([name for name in columns if name in self.raw_names] or self.raw_names[:1])

    def size(self) -> int | None:
        return None


# ---- opening ---------------------------------------------------------------------------------------------------------


def load_examples(source: Source, cfg: RunConfig) -> Examples | None:
    """Return the raw rows of a source, or None if a dataset given by name has no such split."""
    refuse_references()
    if source.kind:
        return FileExamples(source, files_to_read(source, source.kind, source.files))
    folder = str(cache_root(cfg)) if cfg.cache_dir else None
    with read_errors(source):
        return _load_saved(source) if source.saved_to_disk else _load_named(source, folder)


def files_to_read(source: Source, kind: str, files: Iterable[str], separator: str = ",") -> list[File]:
    """Return these files with the names that messages have for them."""
    return [File(file, kind, source.display_names([file]), separator) for file in files]


def _load_saved(source: Source) -> Examples | None:
    """Return the rows of a folder that `save_to_disk` wrote."""
    import datasets

    loaded = datasets.load_from_disk(source.name)
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    files_of_split = {}
    for name, rows in splits.items():
        files_of_split[name] = [part["filename"] for part in rows.cache_files]
    named_files(source, files_of_split)
    rows = splits.get(source.choose_split(splits))
    if rows is None:
        return None
    rows.data.validate(full=True)  # wrong offsets in a file would show other memory, or end the process
    return DatasetExamples(source, rows, list(splits))


def _load_named(source: Source, folder: str | None) -> Examples | None:
    """Return the rows of a folder or Hub dataset."""
    builder, data_files, names, split = open_builder(source, folder)
    if not split:
        return None
    kind = kind_of_files(builder)
    files = [str(file) for file in data_files.get(split, ())]
    if kind and files:
        local = source.fetch_files(builder, files, folder)
        source = dataclasses.replace(source, origins={**source.origins, **dict(zip(local, files, strict=True))})
        separator = getattr(builder.config, "sep", ",")
        return FileExamples(source, files_to_read(source, kind, local, separator), names)
    rows = source.load_split(builder, split, folder)
    files = files if source.files else []
    warn_of_unread_media(source, files, getattr(builder, "EXTENSIONS", ()), rows)
    return DatasetExamples(source, rows, names, files[0] if len(files) == 1 else None)


def open_builder(source: Source, folder: str | None) -> tuple["DatasetBuilder", dict, list[str], str | None]:
    """Return (the builder of `datasets` of a folder or Hub dataset, its files by split, names of splits, split to read).

    Files outside of a folder are refused."""
    import datasets

    options = {"cache_dir": folder} if folder else {}
    if source.files:  # the cache key of `datasets` ignores the content
        options["description"] = repr(source.file_keys(source.files))
    builder = datasets.load_dataset_builder(str(source.name), source.config_name, revision=source.revision, **options)
    data_files = dict(builder.config.data_files or {})
    names = [str(name) for name in builder.info.splits or data_files]
    split = source.choose_split(names)
    if split:
        named_files(source, data_files)
    return builder, data_files, names, split


def kind_of_files(builder: "DatasetBuilder") -> str | None:
    """Return the kind of files that engine/rows/read.py reads instead of a builder of `datasets`; None if it does not.

    `datasets` decides the types of a column by the first rows, or the first file, gives all objects of a column the same
    keys, and makes times of dates. It reads media, archives, and files whose dataset card names types, or says more than
    a separator on how they are written."""
    from datasets.packaged_modules.arrow.arrow import Arrow
    from datasets.packaged_modules.csv.csv import Csv
    from datasets.packaged_modules.json.json import Json
    from datasets.packaged_modules.parquet.parquet import Parquet
    from datasets.packaged_modules.text.text import Text

    kinds = {Json: "json", Csv: "csv", Parquet: "parquet", Arrow: "arrow", Text: "text"}
    kind = next((kind for cls, kind in kinds.items() if isinstance(builder, cls)), None)
    if kind is None or builder.info.features is not None or len(getattr(builder.config, "sep", ",")) > 1:
        return None
    default = type(builder.config)()
    said = type(builder.config).__annotations__.keys() - {"sep", "delimiter", "features", "chunksize", "batch_size"}
    if any(getattr(builder.config, name) != getattr(default, name) for name in said):
        return None
    files = [str(file) for files in (builder.config.data_files or {}).values() for file in files]
    return None if any(file.endswith(".zip") or "::" in file for file in files) else kind


def refuse_references() -> None:
    """Make fsspec refuse reference://, which a dataset's README.md may name.

    Some versions of fsspec run templates in reference files as code."""
    import fsspec

    text = "reference:// is refused, because it may run code: give the files themselves"
    fsspec.register_implementation("reference", "refused.NoSuchClass", clobber=True, errtxt=text)


# ---- errors ----------------------------------------------------------------------------------------------------------


@contextmanager
def read_errors(source: Source, files: Sequence[str] = ()) -> Iterator[None]:
    """Raise UsageError with file and reason instead of an error in reading `files` (default: all of a folder)."""
    try:
        yield
    except Exception as error:
        cause = _root_cause(error)
        if isinstance(cause, OSError) and cause.errno in DISK_FULL:
            raise cause from error
        if isinstance(cause, OSError) and str(cause).startswith("Not enough disk space"):  # of `datasets`
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        if isinstance(cause, UsageError):
            raise UsageError(str(cause)) from error
        name = source.display_names(files or source.files) or source.name
        text = f"{source.field}: {name} could not be read, or has no rows: {one_line(cause, 400)}"
        for file, url in source.origins.items():
            text = text.replace(file, url)
        raise UsageError(text) from error


def _root_cause(error: BaseException) -> BaseException:
    """Return the error that `datasets` wraps.

    After an error at a URL it opens it again, with an argument that fsspec rejects: that TypeError is not the cause."""
    while error.__cause__ is not None and not isinstance(error, UsageError | ImportError):
        hidden = error.__context__ if isinstance(error.__cause__, TypeError) else None
        error = hidden or error.__cause__
    return error
