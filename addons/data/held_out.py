"""Held-out rows (`validation_split`): evaluation rows chosen among the training rows by a hash of their content.

Tests: tests/data/test_held_out.py.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from src.data.arrow_columns import MEDIA


def are_held_out(rows: dict[str, list], features: Mapping[str, Any], share: float) -> np.ndarray:
    """Return for each row whether it is evaluation data, as bools.

    `rows` holds the columns that the task reads; images and audio as {"bytes": …, "path": …}. The result is a function
    of the values of the row alone, so equal rows are all on one side, wherever they are, and a larger share adds rows."""
    columns = {name: [_stable(value, features[name]) for value in values] for name, values in rows.items()}
    hashes = [_hash(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    return np.array([found < int(share * 2**64) for found in hashes], bool)


def _hash(row: dict) -> int:
    return xxhash.xxh3_64_intdigest(json.dumps(_normal(row), sort_keys=True, default=repr).encode())


def _stable(value: Any, feature: Any) -> Any:
    """Return the value as it stays when files are moved or rows are added: content, not path; name, not number."""
    kind = type(feature).__name__
    if kind in MEDIA and isinstance(value, dict):
        return xxhash.xxh3_128_hexdigest(_content(value))
    if kind == "ClassLabel" and isinstance(value, int) and value >= 0:
        return feature.names[value]
    return value


def _content(media: dict) -> bytes:
    try:
        return media["bytes"] if media["bytes"] is not None else Path(media["path"]).read_bytes()
    except OSError:
        return b""  # `encode` is refused this row, with its location


def _normal(value: Any) -> Any:
    """Return a value as it is whatever other rows hold: without null entries of objects, and 1.0 as 1.

    A later row with another key adds it to all rows, and one with a fraction makes all numbers fractions."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _normal(inside) for name, inside in value.items() if inside is not None}
    if isinstance(value, list) and {dict, list, float} & set(map(type, value)):
        return [_normal(inside) for inside in value]
    return value
