"""Read rows from Arrow columns without a copy; refuse columns of mixed types.

Tests: tests/data/test_dataset.py and tests/data/test_bad_rows.py.
"""

import pyarrow as pa

from src.config.errors import UsageError
from src.data.file_errors import describe_file_error

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


# ---- columns of several kinds ------------------------------------------------------------------------------------------


def check_kinds(schema, columns: list[str], files: list[str], name: str) -> None:
    """Raise UsageError for a column of several kinds, which `datasets` holds as JSON, and not always reads back as it was."""
    for column in columns:
        if (
            "arrow.json" in str(schema.field(column).type) and column != "messages"
        ):  # whose turns may differ in their keys
            found = next((text for file in files if (text := describe_file_error(file))), None)
            raise UsageError(found or f"{name}: `{column}` holds values of several kinds")


def quoted(rows) -> bool:
    """Return whether some text is in quotes: `datasets` writes a chunk whose values are of several kinds as JSON, the good
    ones too, which is no other type where a chunk before was text. Only a look at the file tells that from a quotation."""
    import pyarrow.compute as pc

    texts = [c for c in rows.data.columns if pa.types.is_string(c.type) or pa.types.is_large_string(c.type)]
    return any(pc.any(pc.match_substring_regex(c, r'(?s)\A".*"\z')).as_py() for c in texts)
