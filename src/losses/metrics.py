"""Metrics of the rows of an evaluation: exact match, F1, Pearson and Spearman correlation; an add-on of addons/metrics/ loads all others.

Tests: tests/src/tasks/test_text_classification.py and tests/addons/metrics/test_evaluate.py.
"""

from functools import partial
from types import ModuleType

import numpy as np

from engine.config.errors import UsageError
from engine.config.find_addons import addon_names, load_addon


def f1(predictions, references) -> float:
    """Return the harmonic mean of precision and recall, averaged over the labels that occur (macro), in float64."""
    labels, ids = np.unique(np.stack([predictions, references]), return_inverse=True)
    predicted, true = ids.reshape(2, -1)
    count_labels = partial(np.bincount, minlength=len(labels))
    correct = count_labels(true[predicted == true])
    return float(np.mean(2 * correct / (count_labels(predicted) + count_labels(true))))


def pearson(predictions, references) -> float:
    """Return the linear correlation of two vectors, in float64; NaN if one of them is constant."""
    x = np.asarray(predictions, np.float64)
    y = np.asarray(references, np.float64)
    if (x == x[0]).all() or (y == y[0]).all():  # their mean may differ from them by rounding
        return float("nan")
    x = x - x.mean()
    y = y - y.mean()
    return float(np.sum(x * y) / np.sqrt(np.sum(x * x) * np.sum(y * y)))


def spearman(predictions, references) -> float:
    """Return the correlation of the ranks of two vectors, in float64; NaN if one of them is constant."""
    return pearson(ranks(predictions), ranks(references))


def ranks(values) -> np.ndarray:
    """Return the rank of each value; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return ((2 * np.cumsum(counts) - counts + 1) / 2)[inverse]


def exact_match(predictions, references) -> float:
    """Return the share of predictions that are equal to their references."""
    pairs = list(zip(predictions, references, strict=True))
    return sum(prediction == reference for prediction, reference in pairs) / len(pairs)


BUILT_IN = {"exact_match": exact_match, "f1": f1, "pearson": pearson, "spearman": spearman}


def _addon(name: str) -> ModuleType:
    """Return the add-on that loads metrics which are not built in; raise UsageError for the metric `name` without one."""
    addons = addon_names("metrics")
    if not addons:
        raise UsageError(
            f"metrics: {name} needs an add-on that is not here: restore addons/metrics/, or choose from "
            f"{', '.join(BUILT_IN)}"
        )
    return load_addon("metrics", addons[0])


def check_metrics(names: list[str], trust_remote_code: bool) -> list[str]:
    """Return the names without `none`, after loading each metric: it should fail before the first evaluation."""
    names = [name for name in names if name != "none"]
    for name in names:
        if name not in BUILT_IN:
            _addon(name).load_metric(name, trust_remote_code)
    return names


def compute_metrics(names: list[str], predictions: list, references: list, trust_remote_code: bool) -> dict[str, float]:
    """Return the values of the named metrics of class ids, numbers or texts."""
    values: dict[str, float] = {}
    for name in names:
        if name in BUILT_IN:
            values[name] = BUILT_IN[name](predictions, references)
        else:
            values |= _addon(name).compute_metric(name, predictions, references, trust_remote_code)
    return values
