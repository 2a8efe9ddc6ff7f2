"""Images from encoded bytes: read, check, rotate by EXIF, convert to RGB or gray.

Tests: tests/addons/tasks/test_decoding.py.
"""

import io
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.config.errors import UsageError, warn_once

if TYPE_CHECKING:
    from PIL.Image import Image

MODES = {1: "L", 3: "RGB"}  # channels -> mode of Pillow


def read_image(value: Any, column: str, channels: int, location) -> tuple[bytes, tuple[int, int]]:
    """Return (the bytes of an image file as they are, (width, height)) of the raw value {"bytes": …, "path": …}.

    The image is decoded once, so that a broken one is found here: raise UsageError with its file and row."""
    data = file_bytes(value, column, location)
    try:
        size = open_image(data, channels).size
    except Exception as error:
        named = f"{value['path']}: " if value.get("path") else ""
        raise UsageError(f"{location}: {named}the image cannot be read: {error}") from error
    with suppress(Exception):  # a broken frame that is not read
        file = open_file(data)
        if getattr(file, "n_frames", 1) > 1 and file.format != "MPO":  # the other one of a phone is of the same picture
            warn_once(f"images of several frames or pages ({file.format}): only the first one is read")
    return data, size


def file_bytes(value: Any, column: str, location) -> bytes:
    """Return the bytes of the image file of a raw value {"bytes": …, "path": …}. Raise UsageError if there are none."""
    if not isinstance(value, dict):
        kind = "nothing" if value is None else type(value).__name__
        raise UsageError(
            f"{location}: `{column}` holds {kind} instead of an image: give an Image column of `datasets`, as in a "
            "folder of images (with a metadata.jsonl, if needed) or in a Parquet file that `datasets` wrote"
        )
    path = value.get("path") or ""
    try:
        return value.get("bytes") or _read_file(path)
    except Exception as error:
        raise UsageError(f"{location}: {path}: the image cannot be read: {error}") from error


def _read_file(path: str) -> bytes:
    if "://" not in path:
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError("it is not a regular file")  # a pipe or device would be read forever
        with open(path, "rb") as file:
            return file.read()
    import fsspec

    with fsspec.open(path, "rb") as file:  # a file of a stream
        return file.read()  # type: ignore


def open_file(data: bytes | np.ndarray) -> "Image":
    """Return the image of an encoded file, not yet decoded. Pillow would run PostScript, so that is no image here."""
    from PIL import Image

    Image.init()
    return Image.open(io.BytesIO(bytes(data)), formats=[name for name in Image.ID if name != "EPS"])


def open_image(data: bytes | np.ndarray, channels: int, smallest: int | None = None) -> "Image":
    """Return the decoded image, rotated as EXIF says, with `channels` 1 (gray) or 3 (RGB) of 8 bits.

    With `smallest`, a JPEG larger than twice that size is decoded at a fraction of its size, which is much faster.
    Transparent parts become white, as in transformers. Raise ValueError if the values have no known range."""
    from PIL import Image, ImageOps

    image = open_file(data)
    if smallest and min(image.size) > 2 * smallest:
        image.draft(image.mode, (smallest, smallest))
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # convert() would cut off everything above 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels are of mode {image.mode}, whose range is unknown: save it with 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == MODES[channels] else image.convert(MODES[channels])
