"""Columns of files: the features of each file, and the refusal of a column that holds several types.

Tests: tests/engine/data/test_column_types.py.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from engine.config.errors import UsageError
from engine.data import csv_reader, json_reader
from engine.data.column_types import MIXED, features_of_schema, is_json_text

if TYPE_CHECKING:
    from datasets import Features

    from engine.data.sources import Source

EMPTY = "an empty list"  # of any type
BROKEN_TEXT = "text with half of a surrogate pair, which is no character"


def features_of_file(
    builder: str | None, file: str, separator: str = ",", open_file: Callable = open
) -> "Features | dict":
    """Return the features of the columns of a file, of all its rows; {} where `datasets` alone knows them.

    `open_file` opens JSON and CSV files, which may be compressed."""
    from pyarrow import parquet

    if builder == "json":
        return json_reader.features_of_file(file, open_file)
    if builder == "csv":
        return features_of_schema(pa.schema(csv_reader.types_of_file(file, separator, open_file)))
    if builder == "parquet":
        schema = parquet.read_schema(file)
        repeated = {name for name in schema.names if schema.names.count(name) > 1}
        if repeated:
            raise UsageError(f"{file}: the column `{min(repeated)}` is there twice")
        return features_of_schema(schema)
    if builder == "arrow":
        with open(file, "rb") as binary:
            try:
                return features_of_schema(pa.ipc.open_stream(binary).schema)
            except (OSError, pa.ArrowInvalid):
                return features_of_schema(pa.ipc.open_file(binary).schema)
    return {}


# ---- columns of several types ----------------------------------------------------------------------------------------


def refuse_mixed_types(features: "Features", columns: Iterable[str], allowed: Iterable[str], source: "Source") -> None:
    """Raise UsageError for one of `columns` that holds several types, with file and row; not for those `allowed`."""
    for column in columns:
        feature = features.get(column)  # None: of a stream of CSV files
        is_other_json = "Json(" in repr(feature) and not is_json_text(feature)  # of `datasets`
        if column in allowed or not (is_json_text(feature, MIXED) or is_other_json):
            continue
        found = _two_types(source, column)
        what = found or f"{source.field}: {source}: `{column}` holds values of several types"
        fix = "remove it" if BROKEN_TEXT in what else "use one type for all rows"
        raise UsageError(f"{what}: {fix}")


def _two_types(source: "Source", column: str) -> str | None:
    """Return a text with the first two rows of a column that are of different types; None if they are not found."""
    before = None
    for file in filter(os.path.isfile, source.files):
        for place, kind in _types_by_row(source.builder, file, column):
            where = f"{source.display_names([file])}, {place}"
            if " and " in kind:
                return f"{where}: `{column}` holds {kind}"
            if BROKEN_TEXT in kind:
                return f"{where}: `{column}` holds {kind}"
            if before and kind != before[1] and not _both_lists(kind, before[1]):
                return f"{where}: `{column}` holds {kind}, but {before[1]} in {before[0]}"
            before = before if before and before[1] != EMPTY else (where, kind)
    return None


def _both_lists(one: str, other: str) -> bool:
    """Return True for an empty list and another list, which may be of one type."""
    return EMPTY in (one, other) and all(kind.startswith(("a list", EMPTY)) for kind in (one, other))


def _types_by_row(builder: str | None, file: str, column: str) -> Iterator[tuple[str, str]]:
    """Yield (place in the file, type) of the values of a column; for Parquet and Arrow, in which rows have one type,
    that of the first row."""
    if builder in ("parquet", "arrow"):
        feature = features_of_file(builder, file).get(column)
        if feature:
            yield "row 0", str(feature)
    elif file.endswith((".json", ".jsonl")):
        for place, row in json_reader.rows_of_file(file):
            if row.get(column) is not None:
                yield place, _type_name(row[column])


def _type_name(value: Any) -> str:
    if isinstance(value, list):
        inside = {_type_name(item) for item in value if item is not None}
        return f"a list ({' and '.join(sorted(inside))})" if inside else EMPTY
    if isinstance(value, str) and not json_reader.is_unicode(value):
        return BROKEN_TEXT
    return {str: "text", bool: "a bool", int: "a number", float: "a number"}.get(type(value), "an object")
