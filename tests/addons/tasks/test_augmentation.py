"""Random crops, flips, mixup and cutmix: what they keep, and what they draw."""

import numpy as np
import pytest
from PIL import Image

from addons.tasks.image_classification.augmentation import cutout, mix, rand_augment, random_flip, random_resized_crop


@pytest.fixture(autouse=True)
def seed():
    np.random.seed(0)


def test_crops_cover_the_image_and_keep_their_area():
    x, y = np.meshgrid(np.arange(100), np.arange(60))
    image = Image.fromarray(np.stack([x, y, 0 * x], -1).astype(np.uint8))
    areas, left, right = [], 255, 0
    for _ in range(300):
        crop = np.asarray(random_resized_crop(image, 16, 0.25, Image.Resampling.BILINEAR)).astype(float)
        width, height = (np.ptp(crop[..., i]) * 16 / 15 for i in (0, 1))
        areas.append(width * height / 6000)
        left, right = min(left, crop[..., 0].min()), max(right, crop[..., 0].max())
    assert 0.2 < min(areas) < 0.3
    assert 0.8 < max(areas) < 1.05
    assert left < 4
    assert right > 95


def test_flips_have_their_probability():
    image = Image.fromarray(np.array([[1, 2]], np.uint8))
    flipped = [np.asarray(random_flip(image, 0.25)).tolist() == [[2, 1]] for _ in range(400)]
    assert 70 < sum(flipped) < 130
    assert np.asarray(random_flip(image, 0.0)).tolist() == [[1, 2]]


@pytest.mark.parametrize("mixup, cutmix", [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5)])
def test_share_is_that_of_the_pixels(mixup, cutmix):
    """Image i is full of 10 i, so the mean of a mixed image tells its share."""
    pixels = np.full((20, 3, 32, 32), np.arange(20)[:, None, None, None] * 10, np.uint8)
    before = pixels.copy()
    mixed, other, shares = mix(pixels, mixup, cutmix)
    assert (pixels == before).all()
    assert sorted(other) == list(range(20))
    expected = 10 * (shares * np.arange(20) + (1 - shares) * other)
    assert abs(mixed.mean((1, 2, 3)) - expected).max() <= 0.5
    assert len(set(shares)) > 10
    kinds = {len(np.unique(image)) for image in mixed}
    assert kinds <= {1, 2} if cutmix else kinds == {1}  # cutmix has pixels of both images, mixup of neither


def photo(mode: str) -> Image.Image:
    y, x = np.mgrid[:24, :20]
    pixels = np.stack([x * 9, y * 8, 40 + x * y // 4], -1) + 20 * ((x + y) % 3 == 0)[..., None]
    return Image.fromarray(pixels.astype(np.uint8)).convert(mode)


@pytest.mark.parametrize("mode, mean", [("RGB", [0.5, 0.4, 0.3]), ("L", [0.5])])
def test_rand_augment_and_cutout_depend_on_the_seed_only(mode, mean):
    def draw(seed):
        np.random.seed(seed)
        return [cutout(rand_augment(photo(mode), 2, 0.3, mean), 0.4, mean).tobytes() for _ in range(20)]

    assert draw(1) == draw(1)
    assert len({*draw(1), *draw(2)}) > 30


def test_cutout_erases_a_square_of_the_mean():
    erased = np.zeros((24, 20))
    for _ in range(200):
        pixels = np.asarray(cutout(Image.new("RGB", (20, 24)), 0.4, [0.5, 0.4, 0.3]))
        assert {tuple(value) for value in pixels.reshape(-1, 3).tolist()} == {(0, 0, 0), (128, 102, 76)}
        count = (pixels[..., 0] > 0).sum()
        assert 16 <= count <= 64  # 8 x 8, or a part of it at an edge
        erased += pixels[..., 0] > 0
    assert erased.min() > 0
