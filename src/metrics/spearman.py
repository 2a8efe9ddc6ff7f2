"""Spearman rank correlation for the `evaluate` library, included because the Hub's script needs a network and scipy.

Tests: tests/tasks/test_text_classification.py.
"""

import datasets
import evaluate
import numpy as np


def ranks(values) -> np.ndarray:
    """Return the rank of each value; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((2 * last - counts + 1) / 2)[inverse]


class Spearman(evaluate.Metric):
    """The correlation of the ranks of predictions and references, in float64; NaN if one of them is constant."""

    def _info(self):
        features = datasets.Features(
            {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
        )
        return evaluate.MetricInfo(
            description=self.__doc__, citation="", inputs_description="numbers", features=features
        )

    def _compute(self, predictions, references):
        x, y = (ranks(values) - (len(values) + 1) / 2 for values in (predictions, references))
        scale = np.sqrt(np.sum(x * x) * np.sum(y * y))
        return {"spearman": float(np.sum(x * y) / scale) if scale else float("nan")}
