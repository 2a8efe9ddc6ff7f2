"""drawn_characters: gray images of digits and letters (`image`), to classify (`label`)."""

import string
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from samples import _drawn

if TYPE_CHECKING:
    from PIL.Image import Image

CHARACTERS = string.digits + string.ascii_uppercase
SIDE = 32  # pixels of an image
ROWS = {"train": 4000, "validation": 800}


def make(folder: Path) -> None:
    """Write train.parquet and validation.parquet."""
    from datasets import ClassLabel

    _drawn.write_sample(folder, ROWS, draw_character, ClassLabel(names=list(CHARACTERS)), seed=16)


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
