"""Files of the samples of drawn images: train.parquet and validation.parquet. Tests: tests/samples/test_drawn.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def write_sample(folder: Path, rows: dict[str, int], draw: Callable, label: Any, seed: int) -> None:
    """Write so many rows {split: rows} of what `draw(generator, number)` returns. Every call draws the same images."""
    from datasets import Dataset, Features, Image, disable_progress_bars

    disable_progress_bars()
    for number, (split, count) in enumerate(rows.items()):
        generator = np.random.default_rng([number, seed])
        images, labels = zip(*(draw(generator, i) for i in range(count)), strict=True)
        columns = {"image": list(images), "label": list(labels)}
        Dataset.from_dict(columns, Features(image=Image(), label=label)).to_parquet(folder / f"{split}.parquet")
