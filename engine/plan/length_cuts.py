"""Cuts of a step's rows, sorted by length, into micro-batches with the least padding.

Pure functions of the lengths: every process cuts alike. Tests: tests/engine/plan/test_length_cuts.py.
"""

from itertools import pairwise

import numpy as np

OVERHEAD = 1 / 32  # fixed cost of a forward pass, as a share of the token budget
# Parts begin only where a group of rows does: a part of mean size has this many groups or more, unless it has fewer rows.
GROUPS = 8
# The search takes the square of the groups for each part, so it is done in blocks: 25 ms for 4,096 rows. Sorted rows of
# one block differ little in length, so blocks cost little padding.
GROUPS_IN_BLOCK = 128
IMPOSSIBLE = np.iinfo(np.int64).max // 4


def split_equally(count: int, micro_batch: int) -> list[int]:
    """Return the bounds of parts of `micro_batch` rows; the last part may have fewer."""
    return [*range(0, count, micro_batch), count]


def split_by_cost(lengths: np.ndarray, micro_batch: int) -> list[int]:
    """Return the bounds of as many parts as `split_equally` makes, at the least padded tokens. Longest rows come first.

    No part has more padded tokens than `micro_batch` rows of the longest length, and none has a single row, which batch
    norm refuses and torch compiles on its own, if each can have two. Rows of one length are cut equally."""
    count = len(lengths)
    equal = split_equally(count, micro_batch)
    num_parts = len(equal) - 1
    if num_parts <= 1 or micro_batch <= 2 or 2 * num_parts > count or lengths[0] == lengths[-1]:
        return equal
    group = _rows_of_a_group(micro_batch)
    parts_in_block = max(2, GROUPS_IN_BLOCK // max(GROUPS, micro_batch // group))
    num_blocks = -(-num_parts // parts_in_block)
    first_parts = [num_parts * i // num_blocks for i in range(num_blocks + 1)]
    bounds = [0]
    for first, last in pairwise(first_parts):
        start, stop = equal[first], equal[last]
        block = _least_padding(lengths[start:stop], last - first, group, int(lengths[0]) * micro_batch)
        bounds += [start + bound for bound in block] if block else equal[first + 1 : last + 1]
    return bounds


def _rows_of_a_group(micro_batch: int) -> int:
    """Return the greatest divisor of `micro_batch` that leaves at least GROUPS groups in it; 1 if it is small."""
    sizes = range(micro_batch // GROUPS, 1, -1)
    return next((size for size in sizes if micro_batch % size == 0), 1)


def _least_padding(lengths: np.ndarray, num_parts: int, group: int, max_tokens: int) -> list[int]:
    """Return the ends of `num_parts` parts of these rows, longest first, at the least padded tokens; [] if there are none.

    A part consists of whole groups of `group` rows, has two rows or more, and at most `max_tokens` padded tokens."""
    edges = np.array([*range(0, len(lengths), group), len(lengths)])
    if len(edges) > 2 and edges[-1] - edges[-2] == 1:
        edges = np.delete(edges, -2)  # a group of one row joins the group before it
    starts = edges[:-1, None]
    stops = edges[None, 1:]
    rows = stops - starts
    tokens = lengths[starts].astype(np.int64) * rows
    tokens[(rows < 2) | (tokens > max_tokens)] = IMPOSSIBLE
    costs = tokens[0]  # least cost of one part that ends with each group, then of two parts, …
    chosen = []
    for _ in range(num_parts - 1):
        with_last = np.minimum(costs[:-1, None] + tokens[1:], IMPOSSIBLE)
        best = with_last.argmin(axis=0)
        costs = with_last[best, np.arange(len(best))]
        chosen.append(best)
    if costs[-1] >= IMPOSSIBLE:
        return []
    end = len(edges) - 1  # as an index of `edges`
    ends = [end]
    for best in reversed(chosen):
        end = int(best[end - 1]) + 1
        ends.append(end)
    return [int(edges[end]) for end in reversed(ends)]


def split_by_tokens(lengths: np.ndarray, max_tokens: int) -> list[int]:
    """Return the bounds that split rows, longest first, into parts of at most `max_tokens` tokens, at minimum cost.

    The cost of a part is its tokens including padding, plus OVERHEAD × max_tokens. A longer row gets its own part."""
    count = len(lengths)
    overhead = max(1, int(max_tokens * OVERHEAD))
    best = np.zeros(count + 1, np.int64)  # least cost of the first `end` rows
    back = np.zeros(count + 1, np.int64)  # where the last part of that split starts
    for end in range(1, count + 1):
        shortest = max(1, int(lengths[end - 1]))
        starts = np.arange(max(0, end - max(1, max_tokens // shortest)), end)
        tokens = lengths[starts] * (end - starts)
        fits = (tokens <= max_tokens) | (starts == end - 1)
        values = np.where(fits, best[starts] + tokens + overhead, np.iinfo(np.int64).max)
        chosen = int(np.argmin(values))
        best[end] = values[chosen]
        back[end] = starts[chosen]
    bounds = [count]
    while bounds[-1]:
        bounds.append(int(back[bounds[-1]]))
    return bounds[::-1]
