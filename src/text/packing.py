"""Pack documents into full rows."""

import bisect

import numpy as np


def pack(max_length: int, batch: dict) -> dict:
    """Return rows of up to max_length tokens made of the batch's documents, by best fit, longest first.

    A row keeps the lengths of its documents, so that neither attention nor targets cross from one to the next."""
    lengths = batch["length"]
    rows, by_space, spaces = [], {}, []  # by_space: free tokens -> the rows that have them; spaces: its keys in order
    for document in sorted((d for d, n in enumerate(lengths) if n > 1), key=lambda d: -lengths[d]):
        at = bisect.bisect_left(spaces, lengths[document])
        if at < len(spaces):
            space = spaces[at]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[at]
        else:
            space, row = max_length, []
            rows.append(row)
        row.append(document)
        if left := space - lengths[document]:
            if left not in by_space:
                by_space[left] = []
                bisect.insort(spaces, left)
            by_space[left].append(row)
    joined = {
        name: [[x for d in row for x in batch[name][d]] for row in rows]
        for name in ("input_ids", "labels")
        if name in batch
    }
    added = {name: [sum(batch[name][d] for d in row) for row in rows] for name in ("length", "targets", "bytes", "cut")}
    return joined | added | {"documents": [[lengths[d] for d in row] for row in rows]}


def packed_positions(documents: np.ndarray, width: int) -> np.ndarray:
    """Return the position of each token in its document, for a row of `width`; padding counts as one more document."""
    sizes = np.append(documents, width - documents.sum())
    starts = np.cumsum(sizes) - sizes
    return np.arange(width) - np.repeat(starts, sizes)
