"""Cuts of sorted rows at the least padding: as many parts, bounded in size, and equal cuts where lengths are equal."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from engine.plan.length_cuts import split_by_cost, split_equally


def log_normal(count: int, seed: int = 0) -> np.ndarray:
    """Return lengths as of texts, longest first."""
    drawn = np.random.default_rng(seed).lognormal(5.0, 0.8, count)
    return -np.sort(-np.clip(drawn, 4, 1024).astype(np.int64))


def padded_tokens(lengths: np.ndarray, bounds: list[int]) -> int:
    return sum(int(lengths[a]) * (b - a) for a, b in pairwise(bounds))


def sizes(bounds: list[int]) -> list[int]:
    return np.diff(bounds).tolist()


@pytest.mark.parametrize("count, micro_batch, most", [(64, 8, 1.15), (256, 8, 1.05), (512, 32, 1.1)])
def test_padding_of_log_normal_rows(count, micro_batch, most):
    """The mutant cuts equal counts of rows."""
    real = cut = equal = 0
    for seed in range(20):
        lengths = log_normal(count, seed)
        real += lengths.sum()
        cut += padded_tokens(lengths, split_by_cost(lengths, micro_batch))
        equal += padded_tokens(lengths, split_equally(count, micro_batch))
    assert cut / real <= most
    assert cut - real < 0.62 * (equal - real)


@pytest.mark.parametrize("count, micro_batch", [(8, 4), (9, 4), (11, 3), (12, 5), (13, 4)])
def test_no_other_cut_has_less_padding(count, micro_batch):
    for seed in range(10):
        lengths = log_normal(count, seed)
        bounds = split_by_cost(lengths, micro_batch)
        most = micro_batch * lengths[0]
        costs = []
        for inner in combinations(range(1, count), len(bounds) - 2):
            other = [0, *inner, count]
            parts = [lengths[a] * (b - a) for a, b in pairwise(other)]
            if min(sizes(other)) >= 2 and max(parts) <= most:
                costs.append(sum(parts))
        assert padded_tokens(lengths, bounds) == min(costs)


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 5, 8, 17, 64, 100])
def test_parts_are_as_many_and_bounded(micro_batch):
    """As many parts as with equal counts, each within the memory of one of them; no single row if each can have two."""
    for count in (0, 1, 2, 3, 16, 17, 65, 300, 1001):
        lengths = log_normal(count, count)
        bounds = split_by_cost(lengths, micro_batch)
        equal = split_equally(count, micro_batch)
        assert len(bounds) == len(equal)
        assert bounds[0] == 0
        assert bounds[-1] == count
        assert min(sizes(bounds), default=1) >= 1
        assert max((lengths[a] * (b - a) for a, b in pairwise(bounds)), default=0) <= micro_batch * max(
            lengths, default=0
        )
        if not count:
            continue
        assert padded_tokens(lengths, bounds) <= padded_tokens(lengths, equal) + lengths[-1] * micro_batch
        if 2 * (len(bounds) - 1) <= count and micro_batch > 2:
            assert min(sizes(bounds)) >= 2


@pytest.mark.parametrize("count", [1, 7, 64, 65, 1000])
def test_equal_lengths_are_cut_equally(count):
    for micro_batch in (1, 4, 8, 24):
        bounds = split_by_cost(np.full(count, 128), micro_batch)
        assert bounds == split_equally(count, micro_batch)
