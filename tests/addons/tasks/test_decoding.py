"""Images of every kind are decoded to gray or RGB, and broken ones are named with file and row."""

import io
import os

import numpy as np
import pytest
from PIL import Image

from addons.tasks.image_classification.decoding import open_image, read_image
from engine.config.errors import UsageError


def encoded(image, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixel(image, channels, **options):
    return np.asarray(open_image(encoded(image, **options), channels))[0, 0].tolist()


GRADIENT = Image.fromarray(np.arange(6 * 4, dtype=np.uint8).reshape(4, 6) * 10)


@pytest.mark.parametrize(
    "image, rgb",
    [
        (Image.new("RGB", (2, 2), (10, 20, 30)), [10, 20, 30]),
        (Image.new("L", (2, 2), 77), [77, 77, 77]),
        (Image.new("1", (2, 2), 1), [255, 255, 255]),
        (Image.new("P", (2, 2), (10, 20, 30)), [10, 20, 30]),
        (Image.new("RGBA", (2, 2), (10, 20, 30, 255)), [10, 20, 30]),
        (Image.new("RGBA", (2, 2), (0, 0, 0, 0)), [255, 255, 255]),  # transparent: white, not black
        (Image.new("LA", (2, 2), (50, 255)), [50, 50, 50]),
        (Image.fromarray(np.full((2, 2), 0x4080, np.uint16)), [64, 64, 64]),  # 16 bits; convert() would give 255
    ],
)
def test_every_mode_becomes_rgb(image, rgb):
    assert pixel(image, 3) == rgb
    assert len(set(rgb)) > 1 or pixel(image, 1) == rgb[0]


def test_rotation_by_exif():
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    data = encoded(GRADIENT, "JPEG", exif=exif, quality=100)
    assert open_image(data, 1).size == (4, 6)
    turned = np.asarray(open_image(data, 1)).astype(int)
    assert abs(turned - np.rot90(np.asarray(GRADIENT), -1)).max() < 9


def test_large_jpeg_is_decoded_at_a_fraction():
    data = encoded(GRADIENT.resize((1024, 640)), "JPEG")
    assert open_image(data, 1).size == (1024, 640)
    assert open_image(data, 1, smallest=100).size == (256, 160)
    assert open_image(data, 1, smallest=400).size == (1024, 640)


@pytest.mark.parametrize("kind, is_warned", [("GIF", True), ("TIFF", True), ("MPO", False)])
def test_further_frames_are_warned_of_once(capsys, kind, is_warned):
    """MPO is how phones save a photo with a second view of it."""
    data = encoded(GRADIENT, kind, save_all=True, append_images=[GRADIENT.rotate(180)])
    for _ in range(2):
        assert read_image({"bytes": data, "path": None}, "image", 1, "row 7") == (data, (6, 4))
    assert capsys.readouterr().err.count(f"warning: images of several frames or pages ({kind})") == is_warned


def test_image_with_a_broken_second_frame_is_read():
    """Only the first frame is read, as before the warning of further ones."""
    whole = encoded(GRADIENT, "GIF", save_all=True, append_images=[GRADIENT.rotate(180)])
    assert read_image({"bytes": whole[:-60], "path": None}, "image", 1, "row 7")[1] == (6, 4)


def test_unreadable_images_are_named(tmp_path):
    whole = encoded(GRADIENT)
    program = encoded(GRADIENT.convert("RGB"), "EPS")
    reasons = {whole[:-20]: "", b"no image": "cannot identify", program: "cannot identify"}
    for data, reason in (reasons | {encoded(_floats(), "TIFF"): "mode F"}).items():
        with pytest.raises(UsageError, match=f"rows.parquet, row 7: a.png: the image cannot be read: .*{reason}"):
            read_image({"bytes": data, "path": "a.png"}, "image", 3, "rows.parquet, row 7")
    with pytest.raises(UsageError, match=r"row 7: .*gone.png: .*No such file"):
        read_image({"bytes": None, "path": str(tmp_path / "gone.png")}, "image", 3, "row 7")
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(UsageError, match=r"row 7: .*not a regular file"):
        read_image({"bytes": None, "path": str(tmp_path / "pipe.png")}, "image", 3, "row 7")
    for value, found in ((None, "nothing"), ("a.png", "str")):
        with pytest.raises(UsageError, match=f"row 7: `photo` holds {found} instead of an image"):
            read_image(value, "photo", 3, "row 7")
    (tmp_path / "a.png").write_bytes(whole)
    assert read_image({"bytes": None, "path": str(tmp_path / "a.png")}, "image", 3, "row 7") == (whole, (6, 4))


def _floats():
    return Image.fromarray(np.zeros((2, 2), np.float32))
