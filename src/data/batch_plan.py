"""The batch plan: which examples are in which micro-batch of which step, with which seed.

Tests: tests/data/test_batch_plan.py and tests/conformance/.
Nothing here knows about torch, processes or files.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

Quotas = tuple[tuple[int, int], ...]  # (rows, draws per epoch) of each source of a mixture
ROUNDS = 8
OVERHEAD = 1 / 32  # what a forward pass costs besides its positions, as a share of the token budget
BLOCK = 4096  # positions of an epoch that are permuted together: numpy's cost is by the call, not by the number


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What one forward pass sees: its example ids and the seed of all randomness inside it."""

    ids: np.ndarray
    seed: int
    step: int = 0  # optimizer step since the start of the run
    index: int = 0  # position in the step's plan
    cost: int = 0  # positions in the padded rectangle, or rows where lengths are unknown
    last: bool = True  # of its rank's window: gradients are reduced after it
    dummy: bool = False  # run for the backend's sake only, with weight zero


def derive_seed(*parts: int | str) -> int:
    """Return 63 bits that depend on every part and on nothing else."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def permute(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the images of `positions` under the epoch's permutation of range(n), in O(len(positions)) memory.

    A Feistel network over the next even power of two, walked along its cycles until the image is below n
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): a bijection for any round function.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    keys = np.array([derive_seed("order", seed, epoch, r) for r in range(ROUNDS)], np.uint64)

    def encrypt(x: np.ndarray) -> np.ndarray:
        left, right = x >> shift, x & mask
        for key in keys:
            left, right = right, left ^ (splitmix64(right + key) & mask)
        return (left << shift) | right

    x = encrypt(np.asarray(positions).astype(np.uint64))
    outside = np.flatnonzero(x >= n)
    while outside.size:  # the domain is below 4n, so a walk takes fewer than four turns on average
        x[outside] = encrypt(x[outside])
        outside = outside[x[outside] >= n]
    return x.astype(np.int64)


def splitmix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def epoch_order(start: int, stop: int, n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the ids at positions start … stop−1 of the epoch: the same as permute, in a fraction of the time."""
    first = start // BLOCK
    blocks = [_block(number, n, seed, epoch) for number in range(first, -(-stop // BLOCK))]
    return np.concatenate(blocks)[start - first * BLOCK : stop - first * BLOCK]


@lru_cache(maxsize=4)
def _block(number: int, n: int, seed: int, epoch: int) -> np.ndarray:
    return permute(np.arange(number * BLOCK, min((number + 1) * BLOCK, n)), n, seed, epoch)


def example_ids(start: int, stop: int, n: int, seed: int, epoch: int, quotas: Quotas | None = None) -> np.ndarray:
    """Return the ids at positions start … stop−1 of an epoch of `n` draws, from one data set or a mixture of several.

    A mixture has a quota of draws for each of its sources in every epoch, at random places. Over the epochs a source is
    gone through again and again, in another order each time, so that of its rows none is drawn twice before all are drawn
    once. Ids count through the sources one after the other."""
    places = epoch_order(start, stop, n, seed, epoch)
    if quotas is None:
        return places
    ids, first_draw, first_id = np.empty_like(places), 0, 0
    for source, (rows, draws) in enumerate(quotas):
        mine = np.flatnonzero((places >= first_draw) & (places < first_draw + draws))
        passes, within = np.divmod(epoch * draws + places[mine] - first_draw, rows)
        for turn in np.unique(passes).tolist():
            now = passes == turn
            ids[mine[now]] = first_id + permute(within[now], rows, derive_seed("source", seed, source), turn)
        first_draw, first_id = first_draw + draws, first_id + rows
    return ids


def mixture_quotas(rows: Sequence[int], weights: Sequence[float] | None) -> Quotas:
    """Return (rows, draws per epoch) of each source of a mixture whose epochs are as long as all its sources together.

    Without weights every row is drawn once; with them, draws are shared out in their proportion, by largest remainder."""
    if weights is None:
        return tuple((n, n) for n in rows)
    exact = np.asarray(weights, float) / sum(weights) * sum(rows)
    draws = np.floor(exact).astype(np.int64)
    for source in np.argsort(draws - exact, kind="stable")[: sum(rows) - int(draws.sum())]:
        draws[source] += 1
    return tuple(zip(rows, draws.tolist(), strict=True))


def steps_per_epoch(num_examples: int, global_batch: int) -> int:
    """Return the optimizer steps of one epoch; the last one takes what is left, exactly."""
    return -(-num_examples // global_batch)


def plan(
    num_examples: int,
    global_batch: int,
    micro_batch: int,
    seed: int,
    epoch: int,
    step: int,
    lengths: Sequence[int] | np.ndarray | None = None,
    tokens: int | None = None,
    quotas: Quotas | None = None,
) -> list[MicroBatch]:
    """Return the micro-batches of step `step` of epoch `epoch`, the same for any number of processes.

    With `lengths` (indexed by id; read for this step's ids only) the global batch is sorted by length before it is
    cut, so that rows of like length are padded together; with `tokens` it is cut by that budget instead of a number of
    rows. The sum over the global batch does not notice.
    """
    start = step * global_batch
    ids = example_ids(start, min(start + global_batch, num_examples), num_examples, seed, epoch, quotas)
    first = epoch * steps_per_epoch(num_examples, global_batch)
    cuts = split_into_micro_batches(ids, micro_batch, lengths, tokens)
    return [
        MicroBatch(part, derive_seed("micro-batch", seed, epoch, step, j), first + step, j, cost)
        for j, (part, cost) in enumerate(cuts)
    ]


def split_into_micro_batches(
    ids: np.ndarray, micro_batch: int, lengths=None, tokens: int | None = None
) -> list[tuple[np.ndarray, int]]:
    """Return `ids` in parts, longest rows first, each with its cost: of `micro_batch` rows (the last may be smaller), or of
    at most `tokens` positions, padding included."""
    if lengths is None:
        parts = [ids[i : i + micro_batch] for i in range(0, len(ids), micro_batch)]
        return [(part, len(part)) for part in parts]
    long = np.asarray(lengths[ids]).astype(np.int64)
    order = np.argsort(-long, kind="stable")
    ids, long = ids[order], long[order]
    bounds = split_by_tokens(long, tokens) if tokens else [*range(0, len(ids), micro_batch), len(ids)]
    return [(ids[a:b], int(long[a]) * (b - a)) for a, b in pairwise(bounds)]


def split_by_tokens(lengths: np.ndarray, tokens: int) -> list[int]:
    """Return the bounds that cut rows, longest first, into parts of at most `tokens` positions each, at the least cost: their
    positions, padding included, and OVERHEAD for each part. A row that is longer stands alone."""
    count, overhead = len(lengths), max(1, int(tokens * OVERHEAD))
    best, back = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    for end in range(1, count + 1):
        shortest = max(1, int(lengths[end - 1]))
        starts = np.arange(max(0, end - max(1, tokens // shortest)), end)
        area = lengths[starts] * (end - starts)
        values = np.where(
            (area <= tokens) | (starts == end - 1), best[starts] + area + overhead, np.iinfo(np.int64).max
        )
        chosen = int(np.argmin(values))
        best[end], back[end] = values[chosen], starts[chosen]
    bounds = [count]
    while bounds[-1]:
        bounds.append(int(back[bounds[-1]]))
    return bounds[::-1]


def assign_to_ranks(micro_batches: list[MicroBatch], world_size: int) -> list[list[MicroBatch]]:
    """Return each rank's window: costs balanced, forward counts equal up to one, never empty.

    The costliest micro-batch goes to the least loaded rank that still has room (longest processing time first). A
    rank with nothing to do gets a filler of weight zero, because every rank must take part in the reduction.
    """
    room = -(-len(micro_batches) // world_size)
    windows, loads = [[] for _ in range(world_size)], [0] * world_size
    for micro in sorted(micro_batches, key=lambda m: -m.cost):
        rank = min((r for r in range(world_size) if len(windows[r]) < room), key=lambda r: (loads[r], r))
        windows[rank].append(replace(micro, last=False))
        loads[rank] += micro.cost
    dummy = replace(micro_batches[-1], ids=micro_batches[-1].ids[:1], dummy=True)
    for window in windows:
        window[-1:] = [replace(window[-1] if window else dummy, last=True)]
    return windows


def training_order(
    num_examples: int,
    global_batch: int,
    micro_batch: int,
    seed: int,
    rank: int,
    world_size: int,
    start: int,
    stop: int,
    lengths=None,
    tokens: int | None = None,
    quotas: Quotas | None = None,
) -> Iterator[MicroBatch]:
    """Yield one rank's micro-batches of the run's optimizer steps start … stop−1; entering anywhere is O(1)."""
    per_epoch = steps_per_epoch(num_examples, global_batch)
    for step in range(start, stop):
        epoch, within = divmod(step, per_epoch)
        micro_batches = plan(num_examples, global_batch, micro_batch, seed, epoch, within, lengths, tokens, quotas)
        yield from assign_to_ranks(micro_batches, world_size)[rank]


def evaluation_order(num_examples: int, micro_batch: int, seed: int, lengths=None) -> Iterator[MicroBatch]:
    """Yield the micro-batches of an evaluation: every id once, cut inside blocks of 64 micro-batches."""
    block = 64 * micro_batch
    index = 0
    for start in range(0, num_examples, block):
        for part, cost in split_into_micro_batches(
            np.arange(start, min(start + block, num_examples)), micro_batch, lengths
        ):
            yield MicroBatch(part, derive_seed("evaluation", seed, index), index=index, cost=cost)
            index += 1


LOW = np.uint64(0xFFFFFFFF)


def hash_ids(ids: np.ndarray) -> tuple[float, float]:
    """Return two sums over hashes of `ids`, to be added over ranks: the same for any split and any order of the ids.

    Each summand has 32 bits, so a float64 holds the sum of two million of them exactly."""
    hashed = splitmix64(np.asarray(ids).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return float((hashed & LOW).sum()), float((hashed >> np.uint64(32)).sum())
