"""Masking of tokens for masked language models.

Tests: tests/addons/tasks/test_masked_lm.py.
"""

import numpy as np

MASKED, REPLACED = 0.8, 0.1  # shares of the chosen tokens (BERT); the rest stays as it is


def masked_count(candidates: int, probability: float) -> int:
    """Return how many of a row's tokens are chosen: its share, rounded, but at least one if there is one."""
    return min(candidates, max(1, round(candidates * probability)))


def mask_tokens(
    ids: np.ndarray,
    may_be_masked: np.ndarray,
    probability: float,
    mask_id: int,
    vocab_size: int,
    generator: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids in which chosen tokens are masked, replaced by random ones or kept; the chosen positions, sorted).

    `may_be_masked` has a bool per id of the vocabulary. A row's number of chosen tokens does not depend on `generator`.
    So the weight of a row is known before training, and no row is without a target (Devlin et al. 2018)."""
    candidates = np.flatnonzero(may_be_masked[ids])
    count = masked_count(len(candidates), probability)
    positions = np.sort(generator.choice(candidates, count, replace=False))
    share = generator.random(count)
    random = (share >= MASKED) & (share < MASKED + REPLACED)
    masked = ids.copy()
    masked[positions[share < MASKED]] = mask_id
    masked[positions[random]] = generator.integers(0, vocab_size, int(random.sum()))
    return masked, positions
