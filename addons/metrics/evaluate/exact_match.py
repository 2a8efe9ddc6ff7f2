"""Exact match of texts for the `evaluate` library.

Tests: tests/addons/metrics/test_evaluate.py.
"""

import datasets

import evaluate


class ExactMatch(evaluate.Metric):
    """The fraction of texts that equal their reference."""

    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("string"), "references": datasets.Value("string")})
        return evaluate.MetricInfo(description=self.__doc__, citation="", inputs_description="texts", features=features)

    def _compute(self, predictions, references):
        pairs = list(zip(predictions, references, strict=True))
        return {"exact_match": sum(prediction == reference for prediction, reference in pairs) / len(pairs)}
