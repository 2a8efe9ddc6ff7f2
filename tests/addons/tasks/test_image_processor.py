"""Size and normalization: from the options, the model's file or its configuration, and as transformers does them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, MobileViTImageProcessorPil

from addons.tasks.image_classification.image_processor import (
    FILE,
    ImageProcessor,
    normalize,
    read_image_processor,
    stack,
)
from engine.config.run_config import RunConfig

NONE = {"image_size": None, "image_mean": [], "image_std": []}


@pytest.mark.parametrize("size, shorter_side", [(16, 16), (16, 19)])
@pytest.mark.parametrize("shape", [(40, 60), (61, 33), (16, 16), (9, 12)])
def test_transformers_does_the_same_with_the_file(tmp_path, shape, size, shorter_side):
    processor = ImageProcessor(size, shorter_side, [0.5, 0.4, 0.3], [0.2, 0.3, 0.4])
    processor.save_pretrained(tmp_path)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8))
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")(image, return_tensors="pt")["pixel_values"]
    inputs = {"pixels": torch.from_numpy(stack([processor.center(image)]))} | processor.scale(torch.float32)
    ours = normalize(torch.nn.Linear(1, 1), inputs)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_long_strip_takes_no_memory():
    """Its center, without 4 GB for the whole of it in the size of the input."""
    strip = Image.fromarray(np.linspace(0, 255, 20_000).astype(np.uint8)[None])
    center = np.asarray(ImageProcessor(224, 224, [0.5], [0.5]).center(strip))
    assert center.shape == (224, 224)
    assert abs(center.astype(int) - 127).max() <= 1


def test_models_of_timm_say_it_in_their_configuration():
    own = {"input_size": [1, 32, 48], "crop_pct": 0.8, "mean": [0.1], "std": [0.2], "interpolation": "bilinear"}
    found = read_image_processor(RunConfig(), SimpleNamespace(pretrained_cfg=own), SimpleNamespace(**NONE))
    assert found == ImageProcessor(32, 40, [0.1], [0.2], resample=2)


@pytest.mark.parametrize(
    "values, options, expected",
    [
        ({}, {}, (32, 32)),  # of the model
        ({"size": {"height": 64, "width": 64}}, {}, (64, 64)),
        ({"size": {"shortest_edge": 256}, "crop_size": 224}, {}, (224, 256)),
        ({"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}}, {"image_size": 96}, (96, 96)),
        ({"size": 48}, {}, (48, 48)),
        ({"size": 48, "crop_size": 60, "do_center_crop": False}, {}, (48, 48)),
    ],
)
def test_sizes(tmp_path, values, options, expected):
    (tmp_path / FILE).write_text(json.dumps(values | {"image_mean": [0.1, 0.2, 0.3]}))
    config = SimpleNamespace(num_channels=3, image_size=32)
    found = read_image_processor(RunConfig(model_name_or_path=str(tmp_path)), config, SimpleNamespace(**NONE | options))
    assert (found.size, found.shorter_side) == expected
    assert (found.mean, found.std) == ([0.1, 0.2, 0.3], [0.5, 0.5, 0.5])
    assert config.image_size == found.size


def test_file_of_a_model_that_sees_other_pixels(tmp_path, capsys):
    """Its pixels are not normalized, and in another order of colors, which is not done here."""
    sides = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    theirs, field = MobileViTImageProcessorPil(**sides), "do_flip_channel_order"
    theirs.save_pretrained(tmp_path)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    cfg = RunConfig(model_name_or_path=str(tmp_path))
    processor = read_image_processor(cfg, SimpleNamespace(num_channels=3), SimpleNamespace(**NONE))
    inputs = {"pixels": torch.from_numpy(stack([image]))} | processor.scale(torch.float32)
    expected = theirs(image, return_tensors="pt")["pixel_values"].flip(1)
    assert torch.allclose(normalize(torch.nn.Linear(1, 1), inputs), expected, atol=1e-6)
    assert f"{FILE} has {field}, which is not done" in capsys.readouterr().err
