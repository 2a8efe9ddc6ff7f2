"""Pearson correlation for the `evaluate` library, included because the Hub's script needs a network and scipy.

Tests: tests/tasks/test_text_classification.py.
"""

import datasets
import evaluate
import numpy as np


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
        x, y = (np.asarray(values, np.float64) - np.mean(values) for values in (predictions, references))
        scale = np.sqrt(np.sum(x * x) * np.sum(y * y))
        return {"pearson": float(np.sum(x * y) / scale) if scale else float("nan")}
