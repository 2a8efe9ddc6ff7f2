"""Image data for tests: noisy squares and stripes, written as Parquet with columns of `datasets`."""

from pathlib import Path

import datasets
import numpy as np
from PIL import Image

CLASSES = ["rows", "columns", "plain"]


def picture(generator, label: int, width: int = 20, height: int = 18) -> Image.Image:
    """Return noise with bright rows, bright columns, or nothing."""
    pixels = generator.integers(0, 120, (height, width, 3))
    pixels[::4] += 100 * (label == 0)
    pixels[:, ::4] += 100 * (label == 1)
    return Image.fromarray(pixels.astype(np.uint8))


def write_pictures(path, count: int, seed: int = 0) -> Path:
    """Write rows of image and label."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 3, count).tolist()
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=CLASSES))
    rows = {"image": [picture(generator, label) for label in labels], "label": labels}
    datasets.Dataset.from_dict(rows, features).to_parquet(path)
    return Path(path)
