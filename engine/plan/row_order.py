"""Order of rows: the ids at given positions of an epoch, as functions of the seed and the epoch.

Tests: tests/engine/plan/test_batch_plan.py and tests/engine/plan/test_mixture.py.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from engine.plan.seeding import derive_seed

Quotas = tuple[tuple[int, int], ...]  # (rows, draws per epoch) of each source of a mixture
ROUNDS = 8
BLOCK = 4096  # positions of an epoch that are permuted together: numpy's cost is per call, not per number


def permute(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the ids at `positions` of the epoch's permutation of range(n), in O(len(positions)) memory.

    A Feistel network over the next power of four, applied again while the result is not below n (cycle walking:
    Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). It is a bijection for any round function.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    keys = np.array([derive_seed("order", seed, epoch, r) for r in range(ROUNDS)], np.uint64)

    def encrypt(x: np.ndarray) -> np.ndarray:
        left = x >> shift
        right = x & mask
        for key in keys:
            left, right = right, left ^ (splitmix64(right + key) & mask)
        return (left << shift) | right

    x = encrypt(np.asarray(positions).astype(np.uint64))
    outside = np.flatnonzero(x >= n)
    while outside.size:  # the domain is smaller than 4n, so this takes fewer than four rounds on average
        x[outside] = encrypt(x[outside])
        outside = outside[x[outside] >= n]
    return x.astype(np.int64)


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Return the finalizer of SplitMix64 (Steele, Lea and Flood, 2014): each input bit affects each output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def epoch_order(start: int, stop: int, n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the ids at positions start … stop−1 of the epoch. Like `permute`, but faster: blocks are cached."""
    parts = []
    for number in range(start // BLOCK, -(-stop // BLOCK)):
        begin = number * BLOCK
        parts.append(_block(number, n, seed, epoch)[max(0, start - begin) : stop - begin])
    return np.concatenate(parts)


@lru_cache(maxsize=4)
def _block(number: int, n: int, seed: int, epoch: int) -> np.ndarray:
    return permute(np.arange(number * BLOCK, min((number + 1) * BLOCK, n)), n, seed, epoch)


def example_ids(start: int, stop: int, n: int, seed: int, epoch: int, quotas: Quotas | None = None) -> np.ndarray:
    """Return the ids at positions start … stop−1 of an epoch of `n` draws, from one dataset or a mixture.

    Each source of a mixture has a quota of draws per epoch, at random positions. Its draws run through its rows in
    passes, across epochs and in a new order each pass, so every row is drawn once before any row is drawn twice.
    Row ids count through all sources in order."""
    positions = epoch_order(start, stop, n, seed, epoch)
    if quotas is None:
        return positions
    ids = np.empty_like(positions)
    first_draw = first_id = 0
    for source, (rows, draws) in enumerate(quotas):
        mine = np.flatnonzero((positions >= first_draw) & (positions < first_draw + draws))
        passes, within = np.divmod(epoch * draws + positions[mine] - first_draw, rows)
        for number in np.unique(passes).tolist():
            now = passes == number
            ids[mine[now]] = first_id + permute(within[now], rows, derive_seed("source", seed, source), number)
        first_draw += draws
        first_id += rows
    return ids


def mixture_quotas(rows: Sequence[int], weights: Sequence[float] | None) -> Quotas:
    """Return (rows, draws per epoch) of each source of a mixture. An epoch has one draw per row of all sources.

    Without weights every row is drawn once. With weights, draws are proportional to them (largest remainder method)."""
    if weights is None:
        return tuple((n, n) for n in rows)
    exact = np.asarray(weights, float) / sum(weights) * sum(rows)
    draws = np.floor(exact).astype(np.int64)
    for source in np.argsort(draws - exact, kind="stable")[: sum(rows) - int(draws.sum())]:
        draws[source] += 1
    return tuple(zip(rows, draws.tolist(), strict=True))
