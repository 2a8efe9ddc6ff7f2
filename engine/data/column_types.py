"""Types of raw columns: the one type that a column has in all files of a source, or JSON text.

A column that has one plain type (numbers, bools, text, lists of them) is stored as such. Any other column is stored as
JSON text, row by row, and `encode` gets each value as it stands in the file: turns that have other keys in another
file, an absent key as absent and a null as None. So no column can keep a file from being read; one that holds several
types, such as text and numbers, is refused only if the task reads it (`refuse_mixed_types` in row_errors.py).

Tests: tests/engine/data/test_column_types.py.
"""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from engine.config.errors import UsageError
from engine.text.chat_turns import FROM_STRUCTS
from engine.text.labels import SEVERAL_TYPES

if TYPE_CHECKING:
    from datasets import Dataset, Features

ENCODE = json.JSONEncoder(default=str).encode
# Kinds of JSON text, as the `id` of its feature, which `datasets` keeps; FROM_STRUCTS may follow
NESTED = "objects, or lists of them"
MIXED = SEVERAL_TYPES


def json_text(kind: str) -> Any:
    """Return the feature of a column that is stored as JSON text."""
    from datasets import Json

    return Json(id=kind)


def is_json_text(feature: Any, *kinds: str) -> bool:
    """Return True for a feature that `json_text` has made (for one of these kinds), not for other JSON of `datasets`."""
    return type(feature).__name__ == "Json" and str(feature.id).removesuffix(FROM_STRUCTS) in (kinds or (NESTED, MIXED))


def features_of_schema(schema: pa.Schema) -> "Features":
    """Return the features of an Arrow schema. Dictionaries and views only say how values are stored, so they go."""
    from datasets import Features

    fields = [field.with_type(plain_type(field.type)) for field in schema]
    return Features.from_arrow_schema(pa.schema(fields, schema.metadata))


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the same values without dictionaries and views."""
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_list(kind) or pa.types.is_list_view(kind):
        return pa.list_(kind.value_field.with_type(plain_type(kind.value_type)))
    if pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind):
        return pa.large_list(kind.value_field.with_type(plain_type(kind.value_type)))
    if pa.types.is_map(kind):
        pair = [pa.field("key", plain_type(kind.key_type)), pa.field("value", plain_type(kind.item_type))]
        return pa.list_(pa.struct(pair))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind])
    return kind


# ---- one type for all files ------------------------------------------------------------------------------------------


def join_features(files: Iterable[Mapping[str, Any]], builder: str | None = None) -> "Features":
    """Return features that hold the columns of all files, from the features of each. In CSV files all cells are text."""
    from datasets import Features, Value

    joined: dict[str, Any] = {}
    for features in files:
        for name, feature in features.items():
            joined[name] = _join(joined[name], feature) if name in joined else feature
    if builder == "csv":
        joined = {name: Value("string") if is_json_text(feature) else feature for name, feature in joined.items()}
    return Features(joined)


def _join(one: Any, other: Any) -> Any:
    """Return the feature that holds the values of two; JSON text if no plain one does."""
    try:
        return _common(one, other)
    except TypeError:
        kind = NESTED if _may_hold_objects(one) and _may_hold_objects(other) else MIXED
        return json_text(kind + FROM_STRUCTS if _has_structs(one) or _has_structs(other) else kind)


def _may_hold_objects(feature: Any) -> bool:
    inside = getattr(feature, "feature", None)
    if inside is not None:
        return _is_null(inside) or _may_hold_objects(inside)
    return isinstance(feature, dict) or is_json_text(feature, NESTED)


def _has_structs(feature: Any) -> bool:
    inside = getattr(feature, "feature", None)
    if inside is not None:
        return _has_structs(inside)
    return isinstance(feature, dict) or str(getattr(feature, "id", None)).endswith(FROM_STRUCTS)


def _is_null(feature: Any) -> bool:
    return getattr(feature, "dtype", None) == "null"


def _common(one: Any, other: Any) -> Any:
    """Return the plain feature that holds the values of two. Raise TypeError if there is none."""
    from datasets import LargeList, List, Value

    if one == other or _is_null(other):
        return one
    if _is_null(one):
        return other
    if isinstance(one, dict) and isinstance(other, dict):
        shared = {name: _common(one[name], other[name]) for name in one.keys() & other.keys()}
        return one | other | shared
    if isinstance(one, List | LargeList) and isinstance(other, List | LargeList):
        is_large = isinstance(one, LargeList) or isinstance(other, LargeList)
        return (LargeList if is_large else List)(_common(one.feature, other.feature))
    if type(one) is Value and type(other) is Value:
        return _common_value(one, other)
    raise TypeError


def _common_value(one: Any, other: Any) -> Any:
    types = [one.pa_type, other.pa_type]
    texts = [pa.types.is_string(kind) or pa.types.is_large_string(kind) for kind in types]
    unsigned = [pa.types.is_unsigned_integer(kind) for kind in types]
    if texts[0] != texts[1] or (pa.uint64() in types and not all(unsigned)):
        raise TypeError  # pyarrow would make bytes of text beside bytes, and an int64 of both integers
    schemas = [pa.schema([("column", kind)]) for kind in types]
    joined = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    return features_of_schema(pa.schema([("column", joined)]))["column"]


def refuse_missing_columns(file: str, there: Iterable[str], wanted: Iterable[str] | None) -> None:
    """Raise UsageError for a file of a stream that lacks one of these columns: a table without columns has no rows."""
    names = list(there)
    if wanted and not names:
        raise UsageError(f"{file} has only rows without a value: remove it")
    for column in wanted or ():
        if column not in names:
            raise UsageError(
                f"{file}: there is no column `{column}` among {', '.join(names)}, but earlier shards have it"
            )


# ---- tables and rows -------------------------------------------------------------------------------------------------


def cast_table(table: pa.Table, features: "Features") -> pa.Table:
    """Return the table with the types of `features`."""
    from datasets.table import table_cast

    for i, field in enumerate(table.schema):
        column = table.column(i)
        if is_json_text(features.get(field.name)) and not isinstance(field.type, pa.JsonType):
            table = table.set_column(i, field.name, json_array(column.to_pylist()))
        elif pa.types.is_integer(field.type) and features.arrow_schema.field(field.name).type == pa.float64():
            # pandas makes floats of integers where a file lacks some; a checked cast refuses those over 2**53
            table = table.set_column(i, field.name, column.cast(pa.float64(), safe=False))
        elif plain_type(field.type) != field.type:
            table = table.set_column(i, field.name, column.cast(plain_type(field.type)))
    return table_cast(table, features.arrow_schema)


def json_array(values: list) -> pa.Array:
    """Return values as an Arrow array of JSON text; None as null."""
    texts = [None if value is None else ENCODE(value) for value in values]
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))


def keep_json_text(rows: "Dataset") -> "Dataset":
    """Return `rows` with JSON text as text, for `parse_json`: `datasets` would round its numbers."""
    from datasets import Json

    for name, feature in rows.features.items():
        if is_json_text(feature):
            rows = rows.cast_column(name, Json(decode=False, id=feature.id))
    return rows


def parse_json(columns: dict[str, list], features: "Features") -> dict[str, list]:
    """Return columns of rows, with the values of JSON text that `keep_json_text` has kept."""
    for name, feature in features.items():
        if name in columns and is_json_text(feature) and not feature.decode:
            columns = columns | {name: [None if text is None else json.loads(text) for text in columns[name]]}
    return columns
