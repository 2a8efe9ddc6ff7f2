"""Random crops, flips, RandAugment and CutOut of images, mixup and cutmix; drawn from numpy's seeded generator.

Tests: tests/addons/tasks/test_augmentation.py.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

Picture = Image.Image
Fill = Any  # a gray value, or one for each channel
ASPECT = math.log(4 / 3)  # a crop is at most 4/3 as wide as high, or as high as wide


def random_resized_crop(image: Picture, size: int, smallest_area: float, resample: int) -> Picture:
    """Return a random part of `image`, at least `smallest_area` of its area, resized to `size` × `size`."""
    area = image.width * image.height * np.random.uniform(smallest_area, 1)
    aspect = math.exp(np.random.uniform(-ASPECT, ASPECT))
    width, height = min(image.width, math.sqrt(area * aspect)), min(image.height, math.sqrt(area / aspect))
    x, y = np.random.uniform(0, image.width - width), np.random.uniform(0, image.height - height)
    return image.resize((size, size), resample, box=(x, y, x + width, y + height))  # type: ignore


def random_flip(image: Picture, probability: float) -> Picture:
    """Return `image`, mirrored left to right with the given probability."""
    return ImageOps.mirror(image) if np.random.rand() < probability else image


# ---- RandAugment and CutOut ------------------------------------------------------------------------------------------


def _affine(*matrix: float) -> Callable[[Picture, Fill], Picture]:
    return lambda image, fill: image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=fill)


# RandAugment (Cubuk et al. 2020): operations of (image, strength from -1 to 1, fill). Strength 0 changes nothing, except for the first two.
OPERATIONS: dict[str, Callable[[Picture, float, Fill], Picture]] = {
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


def rand_augment(image: Picture, operations: int, strength: float, mean: list[float]) -> Picture:
    """Return `image` after `operations` drawn from OPERATIONS, each with strength + or -; with 0, nothing is drawn."""
    for _ in range(operations):
        name = list(OPERATIONS)[np.random.randint(len(OPERATIONS))]
        image = OPERATIONS[name](image, strength if np.random.rand() < 0.5 else -strength, _bytes(mean))
    return image


def cutout(image: Picture, share: float, mean: list[float]) -> Picture:
    """Return `image` with a square of its mean color around a random pixel (CutOut: DeVries and Taylor 2017).

    Its sides are `share` of the shorter side. The square may reach over the edge, as in the paper; with share 0 nothing is drawn."""
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


# ---- micro-batches ---------------------------------------------------------------------------------------------------


def mix(pixels: np.ndarray, mixup: float, cutmix: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mix each image with another of its micro-batch: by mixup (Zhang et al. 2018) or cutmix (Yun et al. 2019).

    `pixels` is (rows, channels, height, width). `mixup` and `cutmix` are the parameters of their Beta distributions; if
    neither is zero, each row draws one of them; if both are zero, nothing is mixed or drawn. Return (mixed pixels,
    other row of each row, share of a row's own image)."""
    rows, _, height, width = pixels.shape
    if not mixup and not cutmix:
        return pixels, np.arange(rows), np.ones(rows)
    other, shares, mixed = np.random.permutation(rows), np.ones(rows), pixels.copy()
    for i in range(rows):
        by_cutmix = cutmix > 0 and (mixup == 0 or np.random.rand() < 0.5)
        alpha = cutmix if by_cutmix else mixup
        shares[i] = share = np.random.beta(alpha, alpha)
        second = pixels[other[i]]
        if by_cutmix:
            side = math.sqrt(1 - share)
            h, w = round(height * side), round(width * side)
            y, x = np.random.randint(height - h + 1), np.random.randint(width - w + 1)
            mixed[i, :, y : y + h, x : x + w] = second[:, y : y + h, x : x + w]
            shares[i] = 1 - h * w / (height * width)
        else:
            mixed[i] = np.rint(share * pixels[i] + (1 - share) * second)
    return mixed, other, shares
