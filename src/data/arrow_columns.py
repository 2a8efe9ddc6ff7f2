"""Columns of Arrow tables: prepared rows, zero-copy row readers, media as stored.

Tests: tests/data/test_dataset.py and tests/data/test_media.py.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from datasets import Dataset

COUNTS = ("length", "targets", "cut")  # columns for the batch plan and statistics; not passed to `collate`
MEDIA = ("Image", "Audio", "Video")  # features of `datasets` that are stored as bytes and a path


def column_readers(batch: pa.RecordBatch) -> list[tuple[str, Callable[[int], object]]]:
    """Return (name, function that returns the value of row i) of each column that `collate` gets.

    Lists of numbers, arrays of a fixed shape and bytes become numpy views (no copy), numbers numpy scalars, and other
    values Python objects."""
    columns = zip(batch.schema.names, batch.columns, strict=True)
    return [(name, _reader(column)) for name, column in columns if name not in COUNTS]


def _reader(column: pa.Array) -> Callable[[int], object]:
    if pa.types.is_fixed_size_list(column.type) and _is_number(column.type.value_type) and not column.null_count:
        return column.flatten().to_numpy().reshape(-1, column.type.list_size).__getitem__
    if _is_list(column.type) and _is_number(column.type.value_type):
        offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
        return lambda i: values[offsets[i] : offsets[i + 1]]
    if (_is_number(column.type) or _is_array(column.type)) and not column.null_count:
        return column.to_numpy().__getitem__
    if pa.types.is_binary(column.type) and not column.null_count:
        _, starts, data = column.buffers()
        offsets = np.frombuffer(starts, np.int32)[column.offset :]
        values = np.frombuffer(data or b"", np.uint8)
        return lambda i: values[offsets[i] : offsets[i + 1]]
    return lambda i: column[i].as_py()


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_array(kind: pa.DataType) -> bool:
    """Return True for Array2D … Array5D of `datasets`, if no length is left open."""
    return isinstance(kind, pa.ExtensionType) and None not in getattr(kind, "shape", (None,))


def record_batch(rows: dict[str, list], schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns that `encode` returned as Arrow columns. Numpy arrays are written without Python lists."""
    columns = []
    for field in schema:
        try:
            columns.append(_column(rows[field.name], field.type))
        except (KeyError, ValueError, TypeError, pa.ArrowException) as error:
            raise ValueError(f"column `{field.name}` is no {field.type}: {type(error).__name__}: {error}") from error
    return pa.record_batch(columns, schema=schema)


def _column(values: list, kind: pa.DataType) -> pa.Array:
    if not _is_array(kind) or not len(values):
        return pa.array(values, kind)
    from datasets.features.features import numpy_to_pyarrow_listarray

    stacked = np.stack([np.asarray(value) for value in values])
    return pa.ExtensionArray.from_storage(kind, numpy_to_pyarrow_listarray(stacked, pa.type_for_alias(kind.value_type)))


def keep_encoded(rows: "Dataset") -> "Dataset":
    """Return `rows` with images, audio and video as {"bytes": …, "path": …}, as they are stored, not decoded."""
    for name, feature in rows.features.items():
        if type(feature).__name__ in MEDIA:
            rows = rows.cast_column(name, type(feature)(decode=False))
    return rows
