"""RandAugment and CutOut of images with PIL; drawn from numpy's seeded generator.

After Cubuk et al. 2020, "RandAugment", and DeVries and Taylor 2017, "Cutout". Tests: tests/addons/tasks/test_augmentation.py.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Fill = Any  # a gray value, or one for each channel


def _affine(*matrix: float) -> Callable[["Picture", Fill], "Picture"]:
    return lambda image, fill: image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=fill)


# Operations of (image, strength from -1 to 1, fill). Strength 0 changes nothing, except for the first two.
OPERATIONS: dict[str, Callable[["Picture", float, Fill], "Picture"]] = {
    "autocontrast": lambda image, s, fill: ImageOps.autocontrast(image),
    "equalize": lambda image, s, fill: ImageOps.equalize(image),
    "identity": lambda image, s, fill: image,
    "solarize": lambda image, s, fill: ImageOps.solarize(image, round(256 * (1 - abs(s)))),
    "posterize": lambda image, s, fill: ImageOps.posterize(image, 8 - round(4 * abs(s))),
    "color": lambda image, s, fill: ImageEnhance.Color(image).enhance(1 + 0.9 * s),
    "contrast": lambda image, s, fill: ImageEnhance.Contrast(image).enhance(1 + 0.9 * s),
    "brightness": lambda image, s, fill: ImageEnhance.Brightness(image).enhance(1 + 0.9 * s),
    "sharpness": lambda image, s, fill: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * s),
    "rotate": lambda image, s, fill: image.rotate(30 * s, fillcolor=fill),
    "shear_x": lambda image, s, fill: _affine(1, 0.3 * s, 0, 0, 1, 0)(image, fill),
    "shear_y": lambda image, s, fill: _affine(1, 0, 0, 0.3 * s, 1, 0)(image, fill),
    "translate_x": lambda image, s, fill: _affine(1, 0, 0.45 * s * image.width, 0, 1, 0)(image, fill),
    "translate_y": lambda image, s, fill: _affine(1, 0, 0, 0, 1, 0.45 * s * image.height)(image, fill),
}


def rand_augment(image: "Picture", operations: int, strength: float, mean: list[float]) -> "Picture":
    """Return `image` after `operations` drawn from OPERATIONS, each with strength + or -; with 0, nothing is drawn."""
    for _ in range(operations):
        name = list(OPERATIONS)[np.random.randint(len(OPERATIONS))]
        image = OPERATIONS[name](image, strength if np.random.rand() < 0.5 else -strength, _bytes(mean))
    return image


def cutout(image: "Picture", share: float, mean: list[float]) -> "Picture":
    """Return `image` with a square of its mean color around a random pixel; sides are `share` of the shorter side.

    The square may reach over the edge, as in the paper; with share 0 nothing is drawn."""
    if not share:
        return image
    side = round(share * min(image.size))
    x, y = (np.random.randint(n) - side // 2 for n in image.size)
    image = image.copy()
    image.paste(_bytes(mean), (x, y, x + side, y + side))
    return image


def _bytes(mean: list[float]) -> Fill:
    values = tuple(round(255 * value) for value in mean)
    return values if len(values) > 1 else values[0]
