"""Random crops and flips of images, mixup and cutmix of micro-batches; drawn from numpy's seeded generator.

Tests: tests/addons/tasks/test_augmentation.py.
"""

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

ASPECT = math.log(4 / 3)  # a crop is at most 4/3 as wide as high, or as high as wide


def random_resized_crop(image: "Image", size: int, smallest_area: float, resample: int) -> "Image":
    """Return a random part of `image`, at least `smallest_area` of its area, resized to `size` × `size`."""
    area = image.width * image.height * np.random.uniform(smallest_area, 1)
    aspect = math.exp(np.random.uniform(-ASPECT, ASPECT))
    width, height = min(image.width, math.sqrt(area * aspect)), min(image.height, math.sqrt(area / aspect))
    x, y = np.random.uniform(0, image.width - width), np.random.uniform(0, image.height - height)
    return image.resize((size, size), resample, box=(x, y, x + width, y + height))  # type: ignore


def random_flip(image: "Image", probability: float) -> "Image":
    """Return `image`, mirrored left to right with the given probability."""
    from PIL import ImageOps

    return ImageOps.mirror(image) if np.random.rand() < probability else image


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
