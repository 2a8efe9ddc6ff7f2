"""Segmentation: padding without effect, the same view of image and label, IoU as by hand, labels that do not fit."""

import io

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from addons.tasks import segmentation
from addons.tasks.segmentation import segments
from addons.tasks.segmentation.masked_unet import MaskedUNet
from engine.config.errors import UsageError
from engine.rows.prepare import encode_files
from tests.addons.tasks import images
from tests.helpers import kit


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
    return images.segmentation_fields(tmp_path_factory.mktemp("shapes"))


# ---- padding ---------------------------------------------------------------------------------------------------------


def test_padding_has_no_effect_on_the_unet():
    """An image alone, and in the corner of a larger one; the mutant takes the padding for real."""
    torch.manual_seed(0)
    model = MaskedUNet(3, 5, [8, 8, 8]).double()
    image = torch.randn(1, 3, 12, 16, dtype=torch.float64)
    mask = torch.zeros(1, 1, 12, 16)
    mask[..., :10, :13] = 1
    wide, wide_mask = torch.randn(1, 3, 24, 20, dtype=torch.float64), torch.zeros(1, 1, 24, 20)
    wide[..., :12, :16], wide_mask[..., :12, :16] = image, mask
    alone = model(image, mask)[..., :10, :13]
    assert torch.allclose(model(wide, wide_mask)[..., :10, :13], alone, atol=1e-12)
    mutant = model(wide, torch.ones_like(wide_mask))[..., :10, :13]
    assert not torch.allclose(mutant, alone, atol=1e-4)


def test_batches_are_padded_to_their_largest_image(fields):
    task, splits = kit.open_data(**fields | {"unet_widths": [4, 8, 8]})
    rows = splits["train"].rows(np.arange(12))
    batch = task.collate(rows, False)
    sizes = [Image.open(io.BytesIO(row["image"])).size for row in rows]
    width, height = (-(-max(size[i] for size in sizes) // 4) * 4 for i in (0, 1))
    assert batch.inputs["pixels"].shape == (12, 3, height, width)
    assert batch.weight == batch.tokens == sum(w * h for w, h in sizes)
    assert batch.padded_tokens == 12 * width * height
    assert splits["train"].lengths[:12].tolist() == [w * h for w, h in sizes]
    assert (batch.inputs["labels"][~batch.inputs["mask"][:, 0]] == segments.IGNORED).all()


# ---- labels ----------------------------------------------------------------------------------------------------------


def test_image_and_label_are_cropped_and_mirrored_alike():
    np.random.seed(0)
    ids = np.random.randint(0, 200, (30, 40)).astype(np.uint8)
    seen = set()
    for _ in range(50):
        image, label = segments.random_view(Image.fromarray(ids), Image.fromarray(ids), 0.3, 0.5)
        assert (np.asarray(image) == np.asarray(label)).all()
        assert 0.3 <= image.width * image.height / 1200 <= 1
        seen.add(image.size)
    assert len(seen) > 10


def test_iou_equals_that_by_hand():
    generator = np.random.default_rng(0)
    labels, guesses = generator.integers(0, 3, (2, 4, 8, 8))
    labels[0, :2], labels[labels == 2] = (
        segments.IGNORED,
        1,
    )  # class 2 is guessed but never right; class 3 does not occur
    sums = segments.overlaps(torch.from_numpy(guesses), torch.from_numpy(labels), 4)
    real = labels != segments.IGNORED
    expected = []
    for c in range(3):
        a, b = real & (labels == c), real & (guesses == c)
        expected.append((a & b).sum() / (a | b).sum())
    sums = {name: value.item() for name, value in sums.items()}
    found = segments.scores(sums, real.sum(), ["a", "b", "c", "d"])
    assert found["mean_iou"] == pytest.approx(np.mean(expected), rel=1e-12)
    assert found["pixel_accuracy"] == pytest.approx((guesses == labels)[real].mean(), rel=1e-12)
    assert expected[2] == 0


def test_dice_loss_equals_that_by_hand():
    logits = torch.randn(3, 4, 6, 5, dtype=torch.float64)
    labels = torch.randint(0, 3, (3, 6, 5))
    labels[0, :2] = segments.IGNORED
    labels[2] = segments.IGNORED
    found = segments.dice_losses(logits, labels)
    for image, label, loss in zip(logits.softmax(1), labels, found, strict=True):
        real, scores = label != segments.IGNORED, []
        for c in range(4):
            p, y = image[c][real], (label[real] == c).double()
            scores.append((2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1))
        assert loss.item() == pytest.approx(1 - sum(scores).item() / 4, abs=1e-14)
    assert found[2] == 0  # nothing is labeled


def _rows(path, label, size=(16, 16)):
    features = datasets.Features(image=datasets.Image(), label=datasets.Image())
    rows = {"image": [Image.new("RGB", size)] * 2, "label": [Image.new("L", size), label]}
    datasets.Dataset.from_dict(rows, features).to_parquet(path)
    return path


@pytest.mark.parametrize(
    "label, message",
    [
        (Image.new("L", (16, 15)), r"bad.parquet, row 1: .*`label` has 16 × 15 pixels, its image 16 × 16"),
        (Image.new("L", (16, 16), 9), r"row 1: .*holds the class 9, but there are 4 classes"),
        (Image.new("I", (16, 16), -1), r"row 1: .*holds the class -1, but there are 4 classes"),
        (Image.new("RGB", (16, 16)), r"row 1: .*mode RGB: class ids need one channel"),
    ],
)
def test_labels_that_do_not_fit_are_refused(fields, tmp_path, label, message):
    with pytest.raises(UsageError, match=message):
        kit.open_data(**fields | {"train_file": _rows(tmp_path / "bad.parquet", label)})


def test_ignored_and_palette_labels(fields, tmp_path):
    palette = Image.fromarray(np.full((16, 16), 3, np.uint8)).convert("P")
    palette.putpalette([200, 10, 10] * 256)
    palette.putpixel((0, 0), 255)
    task, splits = kit.open_data(**fields | {"train_file": _rows(tmp_path / "palette.parquet", palette)})
    batch = task.collate(splits["train"].rows(np.arange(2)), False)
    assert batch.inputs["labels"][1].unique().tolist() == [segments.IGNORED, 3]
    assert batch.weight == 2 * 256 - 1


def test_cache_key_follows_the_code_of_another_add_on():
    assert kit.REPOSITORY / "addons/tasks/image_classification/decoding.py" in encode_files(
        segmentation.Task(None, None)
    )
