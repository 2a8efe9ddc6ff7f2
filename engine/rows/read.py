"""Raw rows of files: JSON, CSV, Parquet, Arrow and text, each row a dict with its place, until `encode` makes ids of it.

A file is cut into parts: lines of JSON and text by their bytes, which the process that encodes them reads itself. One
process reads a CSV file (line breaks in quotes), a compressed one, a list of JSON and tables, and hands parts to the
others. Only a file that is one list of JSON is held in memory as a whole. Tests: tests/engine/rows/test_read.py.
"""

import functools
from collections.abc import Iterable, Iterator

import pyarrow as pa

from engine.rows import file_parts, read_csv, read_lines, read_tables
from engine.rows.file_parts import File, Open, Part, Place, Row, make_row


def parts_of_file(file: File, columns: Iterable[str] | None = None, open_file: Open | None = None) -> Iterator[Part]:
    """Yield the parts of a file, none if it has no rows. They depend on the file alone, if `columns` (None: all) do.

    `open_file` opens a URL. What cannot be read at all is an error, which ends the file."""
    with file_parts.open_binary(file, open_file) as binary:
        if file.kind in ("parquet", "arrow"):
            yield from read_tables.parts_of_table(file, binary, columns)
        elif file.kind == "csv":
            yield from read_csv.parts_of_csv(file, binary)
        else:
            yield from read_lines.parts_of_lines(
                file, binary, seeks="://" not in file.path and not file_parts.is_compressed(file)
            )


def read_part(part: Part, columns: Iterable[str] | None, data: str) -> list[Row]:
    """Return the rows of a part, with these columns (None: those that each row has). `data`: the split, for messages."""
    file, _, first, content, is_clean = part
    place = functools.partial(Place, data, file.name)
    if isinstance(content, ValueError):
        return [make_row(place("line", first), content)]
    if isinstance(content, pa.Buffer):
        rows = read_tables.rows_of_table(pa.ipc.open_stream(content).read_all(), columns)
        return [make_row(place("row", first + i), row) for i, row in enumerate(rows)]
    if isinstance(content, list):
        return [
            make_row(place("row", first + i), read_lines.select(row, columns, is_clean))
            for i, row in enumerate(content)
        ]
    if isinstance(content, tuple):
        names, records = content
        return [make_row(place("line", line), read_csv.read_record(names, cells, columns)) for line, cells in records]
    of_bytes = {}
    is_begin = first == (0 if content is None else 1)
    if content is None:
        with open(file.path, "rb") as binary:
            binary.seek(first)
            content = binary.read(part.size)
        of_bytes = {"path": file.path, "start": first}
        first = 1
    text, is_clean = read_lines.decode(
        content.removeprefix(read_lines.BOM) if is_begin else content, file.kind == "json"
    )
    lines = read_lines.json_rows(text) if file.kind == "json" else read_lines.text_rows(text)
    return [
        make_row(place("line", first + i, **of_bytes), read_lines.select(row, columns, is_clean)) for i, row in lines
    ]
