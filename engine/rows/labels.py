"""Class labels: names from the model or the data, and their ids.

A task holds one `Labels`: it finds the names, turns the raw labels into ids, and names the outputs of the model.

Tests: tests/src/tasks/test_text_classification.py.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from engine.config.errors import UsageError
from engine.config.run_config import RunConfig


@dataclass(frozen=True)
class Labels:
    """The labels of a task: their names in the order of their ids, and the column of the raw rows that holds them."""

    column: str
    names: list[str] | None = None  # None until the model or the data gives them
    names_of_column: list[str] | None = None  # of a ClassLabel in the split at hand, whose rows hold integers

    def of_model(self, config: Any, head: str = "SequenceClassification") -> "Labels":
        """Return the labels with the names of a pretrained model, if it was trained with this head."""
        return replace(self, names=labels_of_model(config, head))

    def find(self, cfg: RunConfig, examples: Any, split: str) -> "Labels":
        """Return the labels for the rows of a split, with the names that these hold unless the names are known."""
        labels = self.inspect(examples)
        if labels.names is not None:
            return labels
        return replace(labels, names=labels.of_data(cfg, examples.unique(self.column), split))

    def inspect(self, examples: Any) -> "Labels":
        """Return the labels for a split, with the names of a ClassLabel column."""
        return replace(self, names_of_column=getattr(examples.features.get(self.column), "names", None))

    def of_data(self, cfg: RunConfig, values: list, split: str) -> list[str]:
        """Return the names of a ClassLabel column, else the labels in `values`, all of a split.

        Raise UsageError if there is only one, or if a value is no label."""
        names = self.names_of_column
        if names is None:
            if split == "train" and not all(addon.knows_all_rows for addon in cfg.addons):
                raise UsageError(
                    f"{split} data: the labels of a stream are not known before its end: give data with ClassLabels in "
                    f"`{self.column}`, or a model with the labels in its config"
                )
            names = self._distinct(values, split)
        if len(names) < 2:
            only = ", ".join(names) or "empty"
            if names and None in values:  # in CSV also a cell such as NA
                only += ", or holds nothing,"
            raise UsageError(f"{split} data: `{self.column}` is {only} in every row: give data with two labels or more")
        return names

    def _distinct(self, values: list, split: str) -> list[str]:
        """Return the labels in `values`, each once; integers, also those of CSV files, by value: 2 before 10."""
        distinct = set(values) - {None}
        are_integers = all(re.fullmatch(r"-?[0-9]+", str(value)) for value in distinct)
        ordered = sorted(distinct, key=lambda value: (int(value) if are_integers else 0, value))
        for value in ordered:
            if isinstance(value, float | bytes) or str(value) == "-100":
                raise UsageError(
                    f"{split} data: `{self.column}` holds {value}, which is no class: give names or integers from 0"
                )
        return [str(value) for value in ordered]

    def ids(self, values: list, locations) -> list[int]:
        """Return the id of each raw label. An integer is an index into the names of a ClassLabel column.

        Raise UsageError for an unknown label."""
        labels = self.names or []
        names = self.names_of_column
        id_of = {label: i for i, label in enumerate(labels)}
        ids = []
        for i, value in enumerate(values):
            if value is None:
                raise UsageError(f"{locations[i]}: `{self.column}` holds nothing: every row needs a label")
            label = names[value] if names and isinstance(value, int) and value >= 0 else str(value)
            if label not in id_of:
                known = ", ".join(labels)[:200]
                raise UsageError(
                    f"{locations[i]}: the label {label!r} is none of the {len(labels)} known labels: {known}"
                )
            ids.append(id_of[label])
        return ids

    def numbers(self, values: list, locations) -> list[float]:
        """Return the numbers to predict. Raise UsageError for a value that is none, or not finite."""
        numbers = []
        for i, value in enumerate(values):
            try:
                numbers.append(float(value.replace("_", "?") if isinstance(value, str) else value))  # 1_000 is Python's
            except (TypeError, ValueError):
                numbers.append(math.nan)
            if not math.isfinite(numbers[-1]):
                raise UsageError(f"{locations[i]}: `{self.column}` holds {value!r}: a regression needs a finite number")
        return numbers

    def write_to(self, config: Any) -> None:
        """Store the names in the model's configuration, which also sets the size of its head."""
        set_labels(config, self.names or [])


def require_columns(examples: Any, columns: list[str], split: str) -> list[str]:
    """Return `columns`. Raise UsageError if one of them is missing."""
    for column in columns:
        if column not in examples.column_names:
            columns_of_split = ", ".join(examples.column_names)
            raise UsageError(
                f"{split} data: there is no column `{column}` among {columns_of_split}: if it has another name, give "
                f"--columns '{{{column}: NAME}}'"
            )
    return columns


def labels_of_model(config: Any, head: str = "SequenceClassification") -> list[str] | None:
    """Return the labels of a pretrained model with this head in the order of their ids, None for any other model."""
    names = config.id2label or {}
    is_classifier = any(head in name for name in config.architectures or [])
    is_named = not all(str(name).startswith("LABEL_") for name in names.values())
    if not is_classifier and not is_named:
        return None
    return [names[i] for i in sorted(names)]


def set_labels(config: Any, labels: list[str]) -> None:
    """Store the label names in the model's configuration, which also sets the size of its head."""
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: i for i, label in enumerate(labels)}
    config.problem_type = None  # of a model with several labels for each row: `pipeline` would compute sigmoids
