# Needs addons/tasks/image_classification/.
"""Labels of pixels: read, crop with their image, pad, and count for the intersection over union (IoU).

Tests: tests/addons/tasks/test_segmentation.py.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from addons.tasks.image_classification.decoding import file_bytes, open_file
from engine.config.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

IGNORED = -100


def read_label(
    value: Any, column: str, size: tuple[int, int], classes: int, ignored: int, location
) -> tuple[bytes, np.ndarray]:
    """Return (bytes of the file, class ids) of an image of class ids. Raise UsageError if it does not fit the image."""
    data = file_bytes(value, column, location)
    try:
        ids = np.asarray(open_label(data))
    except Exception as error:
        raise UsageError(f"{location}: `{column}` cannot be read: {error}") from error
    if ids.shape != size[::-1]:
        raise UsageError(
            f"{location}: `{column}` has {ids.shape[1]} × {ids.shape[0]} pixels, its image {size[0]} × {size[1]}"
        )
    if (unknown := ids[((ids < 0) | (ids >= classes)) & (ids != ignored)]).size:
        raise UsageError(
            f"{location}: `{column}` holds the class {unknown[0]}, but there are {classes} classes, from 0: correct "
            "class_names or num_classes, or set ignored_value"
        )
    return data, ids


def open_label(data: bytes | np.ndarray) -> "Image":
    """Return an image of class ids; in a palette image they are the palette indices. Raise ValueError for colors."""
    from PIL import Image

    image = open_file(data)
    image.load()
    if image.mode not in ("L", "P", "1", "I", "I;16"):
        raise ValueError(f"its pixels are of mode {image.mode}: class ids need one channel, such as a gray PNG")
    return Image.fromarray(np.asarray(image).astype(np.int32))  # no colors, so that nothing converts the ids


def random_view(image: "Image", label: "Image", smallest_area: float, flip: float) -> tuple["Image", "Image"]:
    """Return the same random part of image and label, at least `smallest_area` of the area, mirrored at random."""
    from PIL import ImageOps

    if smallest_area < 1:
        share = math.sqrt(np.random.uniform(smallest_area, 1))
        width, height = (math.ceil(side * share) for side in image.size)
        x, y = np.random.randint(image.width - width + 1), np.random.randint(image.height - height + 1)
        image, label = (one.crop((x, y, x + width, y + height)) for one in (image, label))
    if np.random.rand() < flip:
        image, label = ImageOps.mirror(image), ImageOps.mirror(label)
    return image, label


def resize(image: "Image", label: "Image", size: int, resample: int) -> tuple["Image", "Image"]:
    """Return both with `size` × `size` pixels; each pixel of the label takes the class of its nearest one."""
    from PIL import Image

    return image.resize((size, size), resample), label.resize((size, size), Image.Resampling.NEAREST)  # type: ignore


def pad(pairs: list[tuple["Image", "Image"]], multiple: int, ignored: int) -> dict[str, torch.Tensor]:
    """Return `pixels`, `labels` (IGNORED without a class) and `mask` (true: no padding) of one size.

    The size is that of the largest image, rounded up to `multiple`."""
    width, height = (-(-max(image.size[i] for image, _ in pairs) // multiple) * multiple for i in (0, 1))
    channels = len(pairs[0][0].getbands())
    pixels = np.zeros((len(pairs), channels, height, width), np.uint8)
    labels = np.full((len(pairs), height, width), IGNORED, np.int64)
    mask = np.zeros((len(pairs), 1, height, width), bool)
    for i, (image, label) in enumerate(pairs):
        w, h = image.size
        pixels[i, :, :h, :w] = np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)
        ids = np.asarray(label)
        labels[i, :h, :w] = np.where(ids == ignored, IGNORED, ids)
        mask[i, :, :h, :w] = True
    return {name: torch.from_numpy(v) for name, v in (("pixels", pixels), ("labels", labels), ("mask", mask))}


def overlaps(predictions: torch.Tensor, labels: torch.Tensor, classes: int) -> dict[str, torch.Tensor]:
    """Return, as sums over labeled pixels, the correct ones and each class's intersection and union. Float64, exact."""
    labeled, real = labels != IGNORED, labels.clamp(min=0)
    counts = torch.zeros(3, classes, dtype=torch.float64, device=labels.device)
    hit = (labeled & (predictions == real)).double()
    counts[0].scatter_add_(0, real.flatten(), hit.flatten())
    for row, ids in ((1, real), (2, predictions)):
        counts[row].scatter_add_(0, ids.flatten(), labeled.double().flatten())
    unions = counts[1] + counts[2] - counts[0]
    sums = {"correct": counts[0].sum()}
    for name, values in (("intersection", counts[0]), ("union", unions)):
        sums |= {f"{name}_{i}": value for i, value in enumerate(values.unbind())}
    return sums


def dice_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return 1 − the mean over classes of the soft Dice coefficient of each image (Milletari et al. 2016), (rows,).

    logits (rows, classes, height, width); pixels without a class do not count. One is added to both sides of the
    quotient, so a class that is neither in the label nor predicted has the coefficient 1."""
    labeled = (labels != IGNORED)[:, None]
    p = logits.softmax(1) * labeled
    classes = torch.arange(logits.shape[1], device=labels.device)[:, None, None]  # F.one_hot would wait for the device
    true = (labels[:, None] == classes).to(p.dtype)
    both, total = (values.flatten(2).sum(2) for values in (p * true, p + true))
    return 1 - ((2 * both + 1) / (total + 1)).mean(1)


def scores(sums: dict[str, float], weight: float, classes: list[str]) -> dict[str, float]:
    """Return pixel accuracy, and the mean over classes of intersection / union, for classes that occur."""
    pairs = [(sums[f"intersection_{i}"], sums[f"union_{i}"]) for i in range(len(classes))]
    ious = [hit / union for hit, union in pairs if union]
    return {"pixel_accuracy": sums["correct"] / weight, "mean_iou": sum(ious) / len(ious)}
