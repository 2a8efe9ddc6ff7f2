"""Raw rows of a source: read by `datasets`, converted to Arrow in its cache, memory-mapped; no row is misread silently.

Replaced in `datasets`, for files, folders, Hub datasets and streams: CSV files are read by `pyarrow.csv`, because pandas
takes an extra field in every row as an index (which shifts the columns), fills short rows, and renames duplicate
columns. A column of JSON whose type changes after the first chunk of a file is an error: `datasets` would write the
texts of that chunk in quotes. The byte order mark of a text is removed.

Tests: tests/data/test_bad_rows.py, which also notices if `datasets` changes.
"""

import csv
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from src.config.errors import UsageError, one_line
from src.config.paths import not_found_locally
from src.config.schema import RunConfig
from src.data.row_errors import json_error, line_of
from src.data.sources import Source, named_files
from src.runtime import private_apis
from src.storage import disk_errors
from src.storage.cache_folder import cache_root

if TYPE_CHECKING:
    from datasets import Dataset

CSV_BLOCK = 16 << 20  # bytes: the first block of a file decides the types of its columns


@dataclass(frozen=True)
class RawRows:
    """Memory-mapped raw rows of a split, and the files that hold these rows, in the same order."""

    source: Source
    rows: "Dataset"
    files: tuple[tuple[str, int], ...] = ()  # (file, number of its rows); () if only `datasets` knows
    splits: tuple[str, ...] = ()  # names of all splits of a dataset given by name

    def describe_row(self, row: int) -> str:
        """Return the file and line of a row (its number in the file, from 0, if lines are not rows)."""
        name, number = str(self.source.name), row
        for file, count in self.files:
            if number < count:
                name = f"{self.source.display_names([file])}, {line_of(file, number)}"
                return f"{name}: {self.source.split} data"
            number -= count
        return f"{name}, row {row}: {self.source.split} data"


def load_raw_rows(source: Source, cfg: RunConfig, apply: Callable[[Callable, list], Iterable] = map) -> RawRows | None:
    """Return the raw rows of a source, or None if a dataset given by name has no such split.

    `apply` is `map`, or does the same in several processes: each file is converted alone, so that its types show."""
    import datasets

    replace_readers()
    folder = str(cache_root(cfg)) if cfg.cache_dir else None
    if not source.builder:
        with _read_errors(source):
            return _load_named(source, folder)
    arrow_files = apply(partial(_convert_file, source, folder), list(source.files))
    parts = [datasets.concatenate_datasets(list(map(datasets.Dataset.from_file, names))) for names in arrow_files]
    try:
        rows = datasets.concatenate_datasets(parts)
    except ValueError as error:
        raise UsageError(f"{source.field}: {source}: files with other types of columns: {one_line(error)}") from error
    return RawRows(source, rows, tuple(zip(source.files, map(len, parts), strict=True)))


def _options(source: Source, folder: str | None, files: Sequence[str]) -> dict:
    """Return options of `datasets`. Its own cache key ignores how a file is read, so ours is added to it."""
    import datasets

    content = (source.builder, source.name, source.hub, source.rows_of, datasets.__version__)
    key = (source.file_keys(files), *content, Path(__file__).read_text())
    added = {"description": hashlib.sha256(repr(key).encode()).hexdigest()[:32]} if files else {}
    return {"cache_dir": folder} | added


def _convert_file(source: Source, folder: str | None, file: str) -> list[str]:
    """Convert a file to Arrow files in the cache of `datasets`, and return their names."""
    import datasets

    options, split = _options(source, folder, [file]), source.rows_of
    with _read_errors(source, [file]):
        rows = datasets.load_dataset(source.builder, data_files={split: [file]}, split=split, **options)
    return [part["filename"] for part in rows.cache_files]


def _load_named(source: Source, folder: str | None) -> RawRows | None:
    """Return the rows of a folder or Hub dataset."""
    import datasets

    if source.saved_to_disk:
        loaded = datasets.load_from_disk(source.name)
        splits = loaded if isinstance(loaded, dict) else {"train": loaded}
        rows = splits.get(source.choose_split(splits))
        return RawRows(source, rows, splits=tuple(splits)) if rows is not None else None
    options = _options(source, folder, source.files)
    builder = datasets.load_dataset_builder(source.name, source.config_name, revision=source.revision, **options)
    data_files = builder.config.data_files or {}
    names = [str(name) for name in builder.info.splits or data_files]
    if not (split := source.choose_split(names)):
        return None
    named_files(source, data_files)
    rows = source.load_split(builder, split, folder)
    files = [str(file) for file in data_files.get(split, [])] if source.files else []
    return RawRows(source, rows, ((files[0], len(rows)),) if len(files) == 1 else (), tuple(names))


# ---- readers of `datasets` -------------------------------------------------------------------------------------------


def replace_readers() -> None:
    """Replace the readers of `datasets` that would misread a file."""
    import fsspec
    from datasets.packaged_modules.csv.csv import Csv
    from datasets.packaged_modules.json.json import Json
    from datasets.packaged_modules.text.text import Text

    # Some versions of fsspec run templates in reference files as code, and a dataset's README.md may name such files.
    text = "reference:// is refused, because it may run code: give the files themselves"
    fsspec.register_implementation("reference", "refused.NoSuchClass", clobber=True, errtxt=text)
    private_apis.replace_table_reader(Csv, _csv_tables)
    private_apis.replace_table_reader(Json, _json_tables)
    private_apis.replace_table_reader(Text, _text_tables)


def _csv_tables(self, base_files, files_iterables):
    """Yield the tables of CSV files, read by pyarrow. A dataset with a dialect of its own is left to pandas."""
    from datasets.builder import Key
    from datasets.packaged_modules.csv import csv as module

    config, default = self.config, module.CsvConfig()
    dialect = module.CsvConfig.__annotations__.keys() - {"sep", "delimiter"}
    if len(config.sep) > 1 or any(getattr(config, name) != getattr(default, name) for name in dialect):
        yield from self.unchecked_tables(base_files, files_iterables)
        return
    open_file = getattr(module, "open", open)  # the `open` of datasets also reads URLs
    # `datasets` would cast the columns of later files and splits to the types of the first one: 007 to 7, 2 to true
    types = {name: pa.string() for name, f in (self.info.features or {}).items() if getattr(f, "dtype", "") == "string"}
    for shard, files in enumerate(files_iterables):
        batches = (
            batch for file in files for batch in _read_csv(partial(open_file, file, "rb"), file, config.sep, types)
        )
        for number, batch in enumerate(batches):
            yield Key(shard, number), pa.Table.from_batches([batch])


def _read_csv(open_file: Callable, file: str, delimiter: str, types: dict) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a CSV file, whose columns are numbers, bools or text. Raise UsageError for a bad row.

    `types` are those of the columns of earlier files, and get those of this file."""
    from pyarrow import csv as arrow_csv

    parse = arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    read = arrow_csv.ReadOptions(use_threads=False, block_size=CSV_BLOCK)  # without threads, errors have row numbers
    words = {"true_values": ["true", "True", "TRUE"], "false_values": ["false", "False", "FALSE"]}  # 1 is a number
    convert = arrow_csv.ConvertOptions(strings_can_be_null=True, **words)

    @contextmanager
    def open_csv():
        with open_file() as binary:
            yield arrow_csv.open_csv(_StrictQuotes(binary, file, delimiter), read, parse, convert)

    try:
        with open_csv() as reader:
            schema, names = reader.schema, reader.schema.names
        if repeated := {name for name in names if names.count(name) > 1}:
            raise UsageError(f"{file}: the column `{min(repeated)}` is named twice")
        convert.column_types = dict.fromkeys(names, pa.string())
        with open_csv() as reader:
            first = next(iter(reader), pa.RecordBatch.from_pylist([], reader.schema))
        columns = zip(schema, first.columns, strict=True)
        inferred = {field.name: pa.string() if _is_text(field.type, cells) else field.type for field, cells in columns}
        convert.column_types = inferred | types
        with open_csv() as reader:
            types.update(inferred | types)
            yield from reader
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: {one_line(error)}") from error


def _is_text(kind: pa.DataType, cells: pa.Array) -> bool:
    """Return whether a CSV column stays text though pyarrow reads `kind`: dates, 0x1F, integers that int64 cannot hold."""
    import pyarrow.compute as pc

    if pa.types.is_integer(kind):
        return bool(pc.any(pc.match_substring(cells, "x", ignore_case=True)).as_py())
    if pa.types.is_floating(kind):  # float64 would round integers
        return bool(pc.all(pc.match_substring_regex(cells, r"^\s*[-+]?\d+\s*$")).as_py())
    return not pa.types.is_boolean(kind)


class _StrictQuotes(io.RawIOBase):
    """A CSV file whose quotes are checked while it is read: pyarrow takes all rows after an open quote as one cell."""

    def __init__(self, binary, file: str, delimiter: str):
        csv.field_size_limit(CSV_BLOCK)
        self._records, self._rest = self._checked_records(binary, file, delimiter), b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        parts, length = [self._rest], len(self._rest)
        while (size < 0 or length < size) and (record := next(self._records, b"")):
            parts.append(record)
            length += len(record)
        content = b"".join(parts)
        size = size if size >= 0 else length
        self._rest = content[size:]
        return content[:size]

    @staticmethod
    def _checked_records(binary, file: str, delimiter: str) -> Iterator[bytes]:
        lines: list[str] = []  # of the current record

        def keep(text: Iterable[str]) -> Iterator[str]:
            for line in text:
                lines.append(line)
                yield line

        row = 1
        with io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            try:
                for _ in csv.reader(keep(text), delimiter=delimiter, strict=True):
                    yield "".join(lines).encode(errors="surrogateescape")
                    lines.clear()
                    row += 1
            except csv.Error as error:
                raise UsageError(f"{file}: Row #{row}: not valid CSV ({error}): check the quotes") from None


def _json_tables(self, *files, **options):
    """Yield what `Json._generate_tables` of datasets 5.2 yields; raise an error if types change after the first chunk."""
    if self.info.features is not None:  # known from the first chunk
        self.config.on_mixed_types = None
    yield from self.unchecked_tables(*files, **options)


def _text_tables(self, *files, **options):
    """Yield what `Text._generate_tables` of datasets 5.2 yields, without the byte order mark at the start of a file."""
    self.config.encoding = "utf-8-sig" if self.config.encoding == "utf-8" else self.config.encoding
    yield from self.unchecked_tables(*files, **options)


# ---- errors ----------------------------------------------------------------------------------------------------------


@contextmanager
def _read_errors(source: Source, files: Sequence[str] = ()) -> Iterator[None]:
    """Raise UsageError with file and reason instead of an error in reading `files` (default: all of a folder)."""
    try:
        yield
    except Exception as error:
        if isinstance(cause := _root_cause(error), OSError) and cause.errno in disk_errors.FULL:
            raise cause from error
        raise UsageError(explain_read_error(source, error, files)) from error


def _root_cause(error: BaseException) -> BaseException:
    """Return the error that `datasets` wraps.

    After an error at a URL it opens it again, with an argument that fsspec rejects: that TypeError is not the cause."""
    while error.__cause__ is not None and not isinstance(error, UsageError | ImportError):
        hidden = error.__context__ if isinstance(error.__cause__, TypeError) else None
        error = hidden or error.__cause__
    return error


def explain_read_error(source: Source, error: BaseException, files: Sequence[str] = ()) -> str:
    """Return the message for `files` (of a folder: all) that `datasets` could not read: file, line if known, reason."""
    cause, files = _root_cause(error), files or source.files
    text = next(filter(None, map(json_error, files)), None) or str(cause)
    for file in files:
        text = text.replace(file, source.display_names([file]))
    if isinstance(cause, UsageError) or text != str(cause):
        return text
    hint = "" if source.builder else not_found_locally(str(source.name))
    name = source.display_names(files) or source.name
    return f"{source.field}: {name} could not be read: {hint}{one_line(cause, 400)}"
