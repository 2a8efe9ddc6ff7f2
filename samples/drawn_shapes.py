"""drawn_shapes: images of circles, rectangles and triangles (`image`), and the class of each pixel (`label`)."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from samples import _drawn

if TYPE_CHECKING:
    from PIL.Image import Image

SHAPES = ["background", "circle", "rectangle", "triangle"]
ROWS = {"train": 600, "validation": 120}


def make(folder: Path) -> None:
    """Write train.parquet and validation.parquet."""
    from datasets import Image

    _drawn.write_sample(folder, ROWS, draw_shapes, Image(), seed=12)


def draw_shapes(generator: np.random.Generator, number: int) -> tuple["Image", "Image"]:
    """Return (image of one to three shapes on noise, image of each pixel's class), 24 to 64 pixels wide and high."""
    from PIL import Image, ImageDraw

    width, height = (int(side) for side in generator.integers(24, 65, 2))
    image = Image.new("RGB", (width, height), tuple(int(c) for c in generator.integers(0, 90, 3)))
    classes = Image.new("L", (width, height))
    for _ in range(generator.integers(1, 4)):
        kind = int(generator.integers(1, len(SHAPES)))
        size = generator.integers(10, 3 * min(width, height) // 4)
        x, y = generator.integers(0, width - size), generator.integers(0, height - size)
        color = tuple(int(c) for c in generator.integers(120, 256, 3))  # lighter than the background
        for target, fill in ((ImageDraw.Draw(image), color), (ImageDraw.Draw(classes), kind)):
            box = [int(x), int(y), int(x + size), int(y + size)]
            if SHAPES[kind] == "circle":
                target.ellipse(box, fill=fill)
            elif SHAPES[kind] == "rectangle":
                target.rectangle(box, fill=fill)
            else:
                target.polygon([(box[0], box[3]), (box[2], box[3]), (int(x + size // 2), box[1])], fill=fill)
    noise = generator.normal(0, 10, (height, width, 3))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8)), classes
