"""Class labels: names from the model or the data, and their ids.

Tests: tests/tasks/test_text_classification.py.
"""

from typing import TYPE_CHECKING

from src.config.errors import UsageError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig


def labels_of_model(config: "PreTrainedConfig") -> list[str] | None:
    """Return the labels of a pretrained classifier in the order of their ids, None for any other model."""
    names = config.id2label or {}
    is_classifier = any("SequenceClassification" in name for name in config.architectures or [])
    is_named = not all(str(name).startswith("LABEL_") for name in names.values())
    return [names[i] for i in sorted(names)] if is_classifier or is_named else None


def class_names(examples: "Dataset", column: str, split: str) -> list[str] | None:
    """Return the names of a ClassLabel column, None for strings, integers and bools. Raise UsageError otherwise."""
    from datasets import ClassLabel

    feature = examples.features[column]
    dtype = str(getattr(feature, "dtype", "lists or objects"))
    if not any(known in dtype for known in ("int", "string", "bool")):
        raise UsageError(f"{split} data: `{column}` holds {dtype}: give labels that are names or integers")
    return feature.names if isinstance(feature, ClassLabel) else None


def labels_of_rows(examples: "Dataset", column: str) -> list[str]:
    """Return the distinct labels, sorted. Numbers are sorted by value: 2 before 10."""
    values = set(examples.unique(column)) - {None}
    return [str(value) for value in sorted(values, key=lambda value: (str(type(value)), value))]


def label_ids(values: list, labels: list[str], names: list[str] | None, column: str, locations) -> list[int]:
    """Return the id of each raw label. An integer is an index into `names`. Raise UsageError for an unknown label."""
    id_of = {label: i for i, label in enumerate(labels)}
    ids = []
    for i, value in enumerate(values):
        if value is None:
            raise UsageError(f"{locations[i]}: `{column}` holds nothing: every row needs a label")
        label = names[value] if names and isinstance(value, int) and value >= 0 else str(value)
        if label not in id_of:
            known = ", ".join(labels)[:200]
            raise UsageError(f"{locations[i]}: the label {label!r} is none of the {len(labels)} known labels: {known}")
        ids.append(id_of[label])
    return ids
