"""Pearson correlation for the `evaluate` library, included because the Hub's script needs a network and scipy.

Tests: tests/tasks/test_text_classification.py.
"""

import datasets
import evaluate
import numpy as np


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Return the linear correlation of two vectors, NaN if one of them is constant."""
    if (x == x[0]).all() or (y == y[0]).all():  # their mean may differ from them by rounding
        return float("nan")
    x, y = x - x.mean(), y - y.mean()
    scale = np.sqrt(np.sum(x * x) * np.sum(y * y))
    return float(np.sum(x * y) / scale) if scale else float("nan")


class Pearson(evaluate.Metric):
    """The linear correlation of predictions and references, in float64; NaN if one of them is constant."""

    def _info(self):
        features = datasets.Features(
            {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
        )
        return evaluate.MetricInfo(
            description=self.__doc__, citation="", inputs_description="numbers", features=features
        )

    def _compute(self, predictions, references):
        return {"pearson": correlation(*(np.asarray(values, np.float64) for values in (predictions, references)))}
