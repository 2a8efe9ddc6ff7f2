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
