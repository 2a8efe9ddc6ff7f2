"""Spearman rank correlation for the `evaluate` library, included because the Hub's script needs a network and scipy.

Tests: tests/tasks/test_text_classification.py.
"""

import numpy as np

from src.metrics.pearson import Pearson, correlation


def ranks(values) -> np.ndarray:
    """Return the rank of each value; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((2 * last - counts + 1) / 2)[inverse]


class Spearman(Pearson):
    """The correlation of the ranks of predictions and references, in float64; NaN if one of them is constant."""

    def _compute(self, predictions, references):
        return {"spearman": correlation(ranks(predictions), ranks(references))}
