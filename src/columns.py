"""Rows out of Arrow columns, one at a time and without a copy.

Leave alone. Guarded by tests/test_data.py.
"""

import pyarrow as pa

COUNTS = ("length", "targets", "cut")  # columns for the plan and the facts, of no use to `collate`


def views(batch: pa.RecordBatch) -> list[tuple]:
    """Return (name, function from the number of a row to its value) of each column that `collate` gets: lists and numbers
    come as numpy without a copy, anything else as Python has it."""
    columns = zip(batch.schema.names, batch.columns, strict=True)
    return [(name, _taker(column)) for name, column in columns if name not in COUNTS]


def _taker(column):
    if pa.types.is_list(column.type) and _plain(column.type.value_type):
        offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
        return lambda i: values[offsets[i] : offsets[i + 1]]
    if _plain(column.type) and not column.null_count:
        return column.to_numpy().__getitem__
    return lambda i: column[i].as_py()


def _plain(kind) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)
