"""JSON files read in chunks, each as an Arrow table: types of all rows of a file, rows by line, strict errors.

`datasets` decides the types of a file by its first 10 MB, gives all objects of a column the same keys, makes times of
dates and writes text in quotes where types change. Here a column that is not of one plain type is JSON text.
Tests: tests/engine/data/test_column_types.py and tests/engine/data/test_bad_rows.py.
"""

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
from pyarrow import json as arrow_json

from engine.config.errors import UsageError, one_line
from engine.data.column_types import (
    MIXED,
    NESTED,
    is_json_text,
    join_features,
    json_array,
    json_text,
    refuse_missing_columns,
)

if TYPE_CHECKING:
    from datasets import Features

CHUNK = 10 << 20  # bytes that are read at once
WHITESPACE = re.compile(r"[ \t\n\r]*")  # between JSON values


def json_tables(builder: Any, files_iterables: Iterable, open_file: Callable) -> Iterator[tuple[Any, pa.Table]]:
    """Yield the tables of JSON files for a builder of `datasets`, in the types of its features if it has some.

    Its `only_columns` (None: all) are read; `late_columns` are refused if they come after the first chunk."""
    from datasets.builder import Key

    features = builder.info.features
    size = min(CHUNK, builder.config.chunksize)
    for shard, files in enumerate(files_iterables):
        for file in files:
            with open_file(file, "rb") as binary:
                for number, chunk in enumerate(_chunks(binary, file, size)):
                    if not features:
                        features = chunk.features()
                        if features or next(chunk.rows(), None):  # a file without rows loses none
                            refuse_missing_columns(file, features, builder.only_columns)
                        features = _features_to_stream(features, builder.only_columns)
                    chunk.refuse_columns(set(builder.late_columns) - {*features})
                    yield Key(shard, number), chunk.table(features, builder.has_card)


def has_own_dialect(config: Any) -> bool:
    """Return True if the configuration of the builder of `datasets` says that the rows are in a field of one object,
    or are not UTF-8."""
    return config.field is not None or config.encoding != "utf-8"


def has_other_json(features: "Features | None") -> bool:
    """Return True if a dataset card has JSON features: `datasets` stores their texts in a way of its own."""
    return any("Json(" in repr(feature) and not is_json_text(feature) for feature in (features or {}).values())


def _features_to_stream(features: "Features", only: list[str] | None) -> "Features":
    """Return the features of `only` these columns; any value may come later in one that holds nothing so far."""
    from datasets import Features

    kept = {name: feature for name, feature in features.items() if only is None or name in only}
    return Features({n: json_text(NESTED) if "'null'" in repr(each) else each for n, each in kept.items()})


def features_of_file(file: str, open_file: Callable = open) -> "Features":
    """Return the features of the columns of a file: of all its rows."""
    with open_file(file, "rb") as binary:
        return join_features(chunk.features() for chunk in _chunks(binary, file, CHUNK))


def rows_of_file(file: str) -> Iterator[tuple[str, dict]]:
    """Yield (its place, such as line 3; row) of a file."""
    with open(file, "rb") as binary:
        for chunk in _chunks(binary, file, CHUNK):
            for number, row in chunk.rows():
                yield chunk.place(number), row


# ---- chunks ----------------------------------------------------------------------------------------------------------


def _chunks(binary: BinaryIO, file: str, size: int) -> "Iterator[Chunk]":
    """Yield the chunks of a file: whole lines of about `size` bytes, or all of a file that is one list."""
    line = 1
    while content := binary.read(size):
        if line == 1:
            content = content.removeprefix(b"\xef\xbb\xbf")  # the byte order mark
        is_list = line == 1 and content.lstrip().startswith(b"[")
        content += binary.read() if is_list else _rest_of_line(binary)
        yield Chunk(file, line, content, is_list)
        line += content.count(b"\n")


def _rest_of_line(binary: BinaryIO) -> bytes:
    from datasets.utils.file_utils import readline

    try:
        return binary.readline()
    except (AttributeError, io.UnsupportedOperation):  # a URL
        return readline(binary)


@dataclass(frozen=True)
class Chunk:
    """Some lines of a JSON file, or a whole file that is one list."""

    file: str
    first_line: int
    content: bytes
    is_list: bool

    def features(self) -> "Features":
        """Return the features of the columns of these rows."""
        from datasets import Features

        table = self._arrow_table()
        if table is not None:
            return Features({field.name: _feature_of_type(field.type) for field in table.schema})
        rows = [row for _, row in self.rows()]
        names = dict.fromkeys(chain.from_iterable(rows))
        features = {}
        for name in names:
            features[name] = _feature([row.get(name) for row in rows])
        return Features(features)

    def table(self, features: "Features", casts: bool) -> pa.Table:
        """Return the columns that `features` names, in its types. Raise UsageError for the first row of another type.

        `casts`: the features are those of a dataset card, which may say that numbers are text, or names classes."""
        schema = features.arrow_schema
        if not casts and not any(map(is_json_text, features.values())):
            table = self._arrow_table(explicit_schema=pa.schema(list(schema)), unexpected_field_behavior="ignore")
            if table is not None and table.schema.types == schema.types:
                return table.replace_schema_metadata(schema.metadata)
        rows = list(self.rows())
        columns = [self._column(rows, name, feature, casts) for name, feature in features.items()]
        return pa.Table.from_arrays(columns, schema=schema)

    def refuse_columns(self, names: set[str]) -> None:
        """Raise UsageError for a row that has one of these columns, which the rows before lack."""
        if not any(name.encode() in self.content for name in names):
            return
        for line, row in self.rows():
            for name in names & row.keys():
                raise UsageError(
                    f"{self.file}, {self.place(line)}: there is a column `{name}`, which the first rows lack: add it "
                    "to all rows (null where there is nothing)"
                )

    def rows(self) -> Iterator[tuple[int, dict]]:
        """Yield (line, row), in a list (number from 0, row).

        Raise UsageError for a row that is no JSON object, or has a key twice."""
        text = self._text()
        line = self.first_line
        position = 0
        end = 0
        while (start := _skip_whitespace(text, end)) < len(text):
            line += text.count("\n", position, start)
            position = start
            try:
                value, end = DECODER.raw_decode(text, position)
            except (ValueError, RecursionError) as error:
                inside = text.count("\n", position, getattr(error, "pos", position)) if self.is_list else 0
                reason = error.msg if isinstance(error, json.JSONDecodeError) else one_line(error)
                raise UsageError(f"{self.file}, line {line + inside}: {reason}") from error
            for place, row in enumerate(value) if self.is_list and isinstance(value, list) else [(line, value)]:
                row = {"text": row} if self.is_list and isinstance(row, str) else row
                if not isinstance(row, dict):
                    text = f"a row must be an object, not {json.dumps(row)[:40]}"
                    raise UsageError(f"{self.file}, {self.place(place)}: {text}")
                yield place, row

    def place(self, number: int) -> str:
        """Return the words for the place of a row, from what `rows` yields."""
        return f"row {number}" if self.is_list else f"line {number}"

    def _text(self) -> str:
        try:
            return self.content.decode()
        except UnicodeDecodeError as error:
            line = self.first_line + self.content.count(b"\n", 0, error.start)
            raise UsageError(f"{self.file}, line {line}: {one_line(error)}") from error

    def _arrow_table(self, **options) -> pa.Table | None:
        """Return the table that pyarrow makes of the chunk; None if it makes none."""
        read = arrow_json.ReadOptions(use_threads=False, block_size=len(self.content) + 1)
        try:
            return arrow_json.read_json(io.BytesIO(self.content), read, arrow_json.ParseOptions(**options))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return None  # `rows` finds the line

    def _column(self, rows: list[tuple[int, dict]], name: str, feature: Any, casts: bool) -> pa.Array:
        if is_json_text(feature):
            return json_array([row.get(name) for _, row in rows])
        try:
            return _array([row.get(name) for _, row in rows], feature, casts)
        except NOT_CONVERTED as error:
            for line, row in rows:
                try:
                    _array([row.get(name)], feature, casts)
                except NOT_CONVERTED:
                    holds = f"`{name}` is {json.dumps(row[name])[:40]}, but the rows before hold {feature}"
                    raise UsageError(f"{self.file}, {self.place(line)}: {holds}") from error
            raise


# ---- values ----------------------------------------------------------------------------------------------------------

NOT_CONVERTED = (pa.ArrowException, TypeError, ValueError, OverflowError)


def _object(pairs: list[tuple[str, Any]]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key `{next(name for name in names if names.count(name) > 1)}` is named twice")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _skip_whitespace(text: str, position: int) -> int:
    found = WHITESPACE.match(text, position)
    return found.end() if found else position


def _feature_of_type(kind: pa.DataType) -> Any:
    """Return the feature of a column to which pyarrow gives this type: of dates, it makes times."""
    from datasets import List, Value

    if pa.types.is_struct(kind):
        return json_text(NESTED)
    if pa.types.is_list(kind):
        inside = _feature_of_type(kind.value_type)
        return inside if is_json_text(inside) else List(inside)
    return Value("string" if pa.types.is_timestamp(kind) else str(kind).replace("double", "float64"))


def _feature(values: list) -> Any:
    """Return the feature of a column with these values."""
    from datasets import List, Value

    kinds = set(map(type, values)) - {type(None)}
    if kinds == {dict}:
        return json_text(NESTED)
    if kinds == {list}:
        inside = _feature(list(chain.from_iterable(value for value in values if value is not None)))
        return inside if is_json_text(inside) else List(inside)
    if kinds == {int} and all(value is None or -(1 << 63) <= value < 1 << 63 for value in values):
        return Value("int64")
    if kinds and kinds <= {int, float}:
        return Value("float64")
    if kinds <= {str} and all(value is None or is_unicode(value) for value in values):
        return Value("string" if kinds else "null")
    return Value("bool") if kinds == {bool} else json_text(MIXED)


def is_unicode(text: str) -> bool:
    """Return False for half of a surrogate pair, such as "\\ud800", which JSON may hold and Arrow's text may not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _array(values: list, feature: Any, casts: bool) -> pa.Array:
    """Return values as an Arrow array. Raise one of NOT_CONVERTED for another type, unless it is cast."""
    from datasets.features.features import get_nested_type
    from datasets.table import cast_array_to_feature

    if casts:
        return cast_array_to_feature(pa.array(values), feature)
    if join_features([{"": feature}, {"": _feature(values)}])[""] != feature:  # pyarrow would make 1 of 1.5
        raise TypeError
    if "float" in str(feature):
        values = _with_floats(values)
    return pa.array(values, get_nested_type(feature))


def _with_floats(value: Any) -> Any:
    """Return a number, or the numbers in a list, as floats: pyarrow refuses integers that no float is equal to."""
    if isinstance(value, list):
        return list(map(_with_floats, value))
    return float(value) if type(value) is int else value
