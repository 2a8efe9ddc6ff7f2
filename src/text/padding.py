"""Padding of token rows to a batch.

Tests: tests/tasks/test_text_classification.py.
"""

import numpy as np


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


def shorten_row(row: dict, length: int) -> dict:
    """Return a row of tokens cut to its first `length` tokens: `input_ids`, `labels`, and `documents` if it is packed.

    Its UTF-8 bytes (`bytes`), which only an evaluation uses, become 0."""
    cut = {name: row[name][:length] for name in ("input_ids", "labels") if name in row}
    if "bytes" in row:
        cut["bytes"] = 0
    if "documents" in row:
        ends = np.minimum(np.cumsum(row["documents"]), length)
        sizes = np.diff(ends, prepend=0)
        cut["documents"] = sizes[sizes > 0]
    return row | cut
