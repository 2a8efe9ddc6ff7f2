"""Rows of tokens in a batch: documents packed into full rows, padding, rows cut to a length.

Tests: tests/text/test_packing.py and tests/tasks/test_text_classification.py.
"""

import bisect

import numpy as np


def pack(max_length: int, batch: dict) -> dict:
    """Return rows of up to max_length tokens, packed from the documents of a batch (best fit, longest document first).

    A row keeps the lengths of its documents, so neither attention nor targets cross from one document to the next.
    Documents of one token are dropped, because they have no target."""
    rows = _best_fit(batch["length"], max_length)
    packed: dict[str, list] = {}
    for name in ("input_ids", "labels"):
        if name in batch:
            packed[name] = [[token for document in row for token in batch[name][document]] for row in rows]
    for name in ("length", "targets", "bytes", "cut"):
        packed[name] = [sum(batch[name][document] for document in row) for row in rows]
    packed["documents"] = [[batch["length"][document] for document in row] for row in rows]
    return packed


def _best_fit(lengths: list[int], max_length: int) -> list[list[int]]:
    """Return the document indices of each row. A document goes into the fullest row that still has space for it."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int, list[int]]] = []  # (space, −time of the last change, row), sorted
    documents = [document for document, length in enumerate(lengths) if length > 1]
    for time, document in enumerate(sorted(documents, key=lambda document: -lengths[document])):
        at = bisect.bisect_left(open_rows, (lengths[document],))
        if at == len(open_rows):
            space, row = max_length, []
            rows.append(row)
        else:
            space, _, row = open_rows.pop(at)
        row.append(document)
        if space := space - lengths[document]:
            bisect.insort(open_rows, (space, -time, row))
    return rows


def packed_positions(documents: np.ndarray, width: int) -> np.ndarray:
    """Return the position of each token in its document, for a row padded to `width`. Padding is one more document."""
    sizes = np.append(documents, width - documents.sum())
    starts = np.cumsum(sizes) - sizes
    return np.arange(width) - np.repeat(starts, sizes)


def padded_length(lengths: list[int], multiple_of: int | None, max_length: int) -> int:
    """Return the width of a padded micro-batch: its longest row, rounded up to `multiple_of`, up to max_length."""
    longest = max(1, *lengths)
    if not multiple_of:  # set it so that torch.compile sees fewer shapes
        return longest
    rounded_up = -(-longest // multiple_of) * multiple_of
    return max(longest, min(rounded_up, max_length))


def pad_columns(rows: list[dict], padding: dict[str, int], width: int) -> dict[str, np.ndarray]:
    """Return each column that `padding` names as an int64 array (rows, width), padded on the right with its value.

    Add `attention_mask`, unless no row is shorter than `width`: without a mask attention uses its fast kernels."""
    padded = {name: np.full((len(rows), width), value, np.int64) for name, value in padding.items()}
    mask = np.zeros((len(rows), width), np.int64)
    for i, row in enumerate(rows):
        for name in padding:
            padded[name][i, : len(row[name])] = row[name]
        mask[i, : max(1, len(row["input_ids"]))] = 1  # a row that attends to nothing would be NaN
    return padded if mask.all() else padded | {"attention_mask": mask}
