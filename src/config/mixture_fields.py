"""The field `mixture`: several named datasets, each with files or a dataset name, and a weight.

Tests: tests/data/test_mixture.py.
"""

from collections.abc import Iterator
from typing import Any

from src.config.errors import did_you_mean
from src.config.paths import locate
from src.config.schema import RunConfig

FILE_FIELDS = ("train_file", "validation_file")
NAME_FIELDS = ("dataset_name", "dataset_config_name", "dataset_revision", "dataset_split")
FIELDS = (*FILE_FIELDS, *NAME_FIELDS, "weight")
MAX_WEIGHT = 1e100  # so that a sum of weights is finite


def as_list(value: Any) -> list:
    """Return a list unchanged, None as an empty list, and any other value as a list with one item."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def mixture_errors(cfg: RunConfig) -> Iterator[str]:
    """Yield every error of the field `mixture`."""
    if cfg.mixture is None:
        return
    for name in ("dataset_name", "train_file"):
        if getattr(cfg, name):
            yield f"mixture and {name} are both given: keep one"
    if len(cfg.mixture) < 2:
        yield "mixture: give at least two sources, each as NAME: {train_file: …, weight: …}"
    weights = []
    for name, source in cfg.mixture.items():
        if not name.strip() or "/" in name or not name.isprintable():
            yield f"mixture: {name!r}: source names must be non-empty, one line, without '/'"
        if isinstance(source, dict):
            yield from (f"mixture: {name}: {error}" for error in _source_errors(source))
            weights.append(source.get("weight"))
        else:
            yield f"mixture: {name}: {source!r}: expected fields of a source, such as train_file"
    if None in weights and any(weight is not None for weight in weights):
        yield "mixture: give all sources a weight, or none (then the size of a source is its weight)"


def _source_errors(source: dict) -> Iterator[str]:
    for field in source:
        if field not in FIELDS:
            yield f"{field}: unknown field{did_you_mean(str(field), FIELDS)}"
    for field in (*FILE_FIELDS, *NAME_FIELDS):
        values = as_list(source.get(field))
        are_names = all(isinstance(value, str) and value for value in values)
        if field in FILE_FIELDS and not are_names:
            yield f"{field}: {source[field]!r}: expected names of files"
        if field in NAME_FIELDS and (not are_names or len(values) > 1):
            yield f"{field}: {source[field]!r}: expected one name"
    if bool(source.get("train_file")) == bool(source.get("dataset_name")):
        yield "give either train_file or dataset_name"
    for field in ("dataset_config_name", "dataset_split"):
        if source.get(field) and not source.get("dataset_name"):
            yield f"{field} is given without dataset_name: give both, or neither"
    weight = source.get("weight")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if weight is not None and not (is_number and 0 < weight <= MAX_WEIGHT):
        yield f"weight is {weight!r}: it must be a number above 0, at most {MAX_WEIGHT:g}"


def with_absolute_paths(mixture: dict | None) -> dict | None:
    """Return a copy of the mixture in which local files and folders are absolute paths."""
    if not mixture:
        return None
    found = {}
    for name, source in mixture.items():
        found[name] = dict(source)
        for field in FILE_FIELDS:
            if field in source:
                found[name][field] = [locate(file) for file in as_list(source[field])]
        if source.get("dataset_name"):
            found[name]["dataset_name"] = locate(source["dataset_name"])
    return found
