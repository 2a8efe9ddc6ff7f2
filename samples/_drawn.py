"""Sample datasets of images that Pillow draws: characters to classify, shapes to segment.

Delete this file and its uses when you have your own data. Tests: tests/download/test_drawn_images.py.
"""

import string
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

CHARACTERS = string.digits + string.ascii_uppercase
SHAPES = ["background", "circle", "rectangle", "triangle"]
SIDE = 32  # pixels of an image of a character
ROWS = {"drawn_characters": {"train": 4000, "validation": 800}, "drawn_shapes": {"train": 600, "validation": 120}}
SAMPLES = tuple(ROWS)


def draw_sample(name: str, target: Path) -> None:
    """Write train.parquet and validation.parquet of the sample `name`. Every call draws the same images."""
    from datasets import ClassLabel, Dataset, Features, Image, disable_progress_bars

    disable_progress_bars()
    draw = draw_character if name == "drawn_characters" else draw_shapes
    label = ClassLabel(names=list(CHARACTERS)) if name == "drawn_characters" else Image()
    for number, (split, count) in enumerate(ROWS[name].items()):
        generator = np.random.default_rng([number, len(name)])
        images, labels = zip(*(draw(generator, i) for i in range(count)), strict=True)
        rows = {"image": list(images), "label": list(labels)}
        Dataset.from_dict(rows, Features(image=Image(), label=label)).to_parquet(target / f"{split}.parquet")


def draw_character(generator: np.random.Generator, number: int) -> tuple["Image", int]:
    """Return (image of one character at a random place, size and angle on noise, its class)."""
    from PIL import Image, ImageDraw

    label = number % len(CHARACTERS)
    paper = int(generator.integers(0, 256))
    ink = (paper + int(generator.integers(100, 157))) % 256  # a difference of at least 100
    mask = Image.new("L", (SIDE, SIDE))
    place = SIDE / 2 + generator.uniform(-3, 3, 2)
    font = _font(int(generator.integers(18, 27)))
    ImageDraw.Draw(mask).text(tuple(place), CHARACTERS[label], fill=255, font=font, anchor="mm")
    mask = mask.rotate(generator.uniform(-15, 15), Image.Resampling.BILINEAR)
    share = np.asarray(mask) / 255.0
    pixels = share * ink + (1 - share) * paper + generator.normal(0, 12, share.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), label


@cache
def _font(size: int):
    from PIL import ImageFont

    return ImageFont.load_default(size)


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
