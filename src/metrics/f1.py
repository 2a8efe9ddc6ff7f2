"""F1 score for the `evaluate` library, included because the Hub's script needs a network and scikit-learn.

Tests: tests/tasks/test_text_classification.py.
"""

import datasets
import evaluate
import numpy as np


class F1(evaluate.Metric):
    """The harmonic mean of precision and recall, averaged over the labels that occur (macro), in float64."""

    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(
            description=self.__doc__, citation="", inputs_description="class ids", features=features
        )

    def _compute(self, predictions, references, average="macro"):
        if average != "macro":
            raise ValueError(f"average is {average!r}: only 'macro' is supported")
        predictions, references = np.asarray(predictions), np.asarray(references)
        scores = []
        for label in np.union1d(predictions, references):
            predicted, true = predictions == label, references == label
            scores.append(2 * np.sum(predicted & true) / (predicted.sum() + true.sum()))
        return {"f1": float(np.mean(scores))}
