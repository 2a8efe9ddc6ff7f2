"""Size and normalization of images: read from and written to preprocessor_config.json.

Tests: tests/addons/tasks/test_image_processor.py.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from addons.tasks.image_classification.decoding import MODES
from engine.config.errors import UsageError, warn
from engine.config.option import option
from engine.config.run_config import RunConfig
from engine.models.config_and_tokenizer import model_folder
from src.losses.cross_entropy import ClassCrossEntropy

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedConfig

FILE = "preprocessor_config.json"
BILINEAR, BICUBIC = 2, 3
DEFAULT_SIZE = 224
NOT_DONE = ("do_flip_channel_order", "include_top", "rescale_offset", "do_reduce_labels")  # of some models


@dataclass
class ImageOptions(ClassCrossEntropy):
    """Options of tasks with images."""

    image_size: int | None = option(
        "height and width of the input, in pixels (default: the model's, or the image's)", min=1
    )
    image_mean: list[float] = option(
        "mean of each channel, from 0 to 1 (default: the model's)", [], from_checkpoint=True
    )
    image_std: list[float] = option(
        "standard deviation of each channel (default: the model's)", [], from_checkpoint=True
    )
    horizontal_flip: float = option("probability of mirroring an image", 0.5, min=0, max=1)


@dataclass
class ImageProcessor:
    """How an image becomes the input of a model. `pipeline` of transformers does the same for RGB models."""

    size: int  # height and width of the input
    shorter_side: int  # the image is resized to it; its center is the input
    mean: list[float]  # of each channel, for pixels from 0 to 1
    std: list[float]
    resample: int = BICUBIC
    is_square: bool = False  # resized to a square, not cropped, as for segmentation

    @property
    def channels(self) -> int:
        """1 for gray images, 3 for RGB."""
        return len(self.mean)

    def center(self, image: "Image") -> "Image":
        """Return the center of `image`: `size` × `size`, after its shorter side was resized to `shorter_side`."""
        short = min(image.size)
        if max(image.size) > 8 * short:  # resizing all of a long strip takes memory (1 × 20,000 pixels: 4 GB)
            sides = [min(side, 8 * short) for side in image.size]
            left, top = ((side - kept) // 2 for side, kept in zip(image.size, sides, strict=True))
            image = image.crop((left, top, left + sides[0], top + sides[1]))
        width, height = (int(self.shorter_side * side / short) for side in image.size)
        image = image if (width, height) == image.size else image.resize((width, height), self.resample)  # type: ignore
        left, top = (width - self.size) // 2, (height - self.size) // 2
        return image.crop((left, top, left + self.size, top + self.size))

    def scale(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return mean and standard deviation of pixels from 0 to 255, as inputs for `normalize`."""
        return {"mean": torch.tensor(self.mean, dtype=dtype) * 255, "std": torch.tensor(self.std, dtype=dtype) * 255}

    def save_pretrained(self, folder: str | Path) -> None:
        """Write preprocessor_config.json."""
        square = {"height": self.size, "width": self.size}
        values = {
            # The first type resizes to a square; the second resizes the shorter side, then takes the center.
            "image_processor_type": "SegformerImageProcessor" if self.is_square else "CLIPImageProcessor",
            "do_convert_rgb": len(self.mean) == 3,
            "do_resize": True,
            "size": square if self.is_square else {"shortest_edge": self.shorter_side},
            "resample": self.resample,
            "do_center_crop": not self.is_square,
            "crop_size": None if self.is_square else square,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": self.mean,
            "image_std": self.std,
        }
        Path(folder, FILE).write_text(json.dumps(values, indent=2) + "\n")


def read_image_processor(cfg: RunConfig, config: "PreTrainedConfig", options: ImageOptions) -> ImageProcessor:
    """Return what the options say, else preprocessor_config.json of the model, else the model's configuration (timm's, too).

    Set the size in `config`, from which models make position embeddings. Raise UsageError if channels do not fit."""
    timm = getattr(config, "pretrained_cfg", None) or {}
    values = _read_file(cfg) or _of_timm(timm)
    channels = getattr(config, "num_channels", None) or timm.get("input_size", [3])[0]
    if channels not in MODES:
        raise UsageError(f"num_channels of the model is {channels}: images have 1 (gray) or 3 (RGB)")
    if not values.get("do_normalize", not values.get("do_flip_channel_order")):  # pixels from 0 to 1
        values = values | {"image_mean": [0.0] * channels, "image_std": [1.0] * channels}
    if other := [name for name in NOT_DONE if values.get(name)]:
        warn(f"{FILE} has {', '.join(other)}, which is not done: the model has seen other pixels or labels")
    mean = options.image_mean or values.get("image_mean") or [0.5] * channels
    std = options.image_std or values.get("image_std") or [0.5] * channels
    for name, numbers in (("image_mean", mean), ("image_std", std)):
        if len(numbers) != channels or (name == "image_std" and min(numbers) <= 0):
            raise UsageError(f"{name} is {numbers}: give {channels} numbers, one for each channel of the model")
    resized, cropped = _side(values.get("size")), values.get("do_center_crop", True) and _side(values.get("crop_size"))
    model_size = _side(getattr(config, "image_size", None))
    size = options.image_size or cropped or resized or model_size or DEFAULT_SIZE
    shorter_side = resized if resized and cropped and not options.image_size else size
    if model_size:
        config.image_size = size
    return ImageProcessor(size, max(size, shorter_side), mean, std, values.get("resample", BICUBIC))


def _read_file(cfg: RunConfig) -> dict:
    if not cfg.model_name_or_path:
        return {}
    file = Path(model_folder(cfg, cfg.model_name_or_path), FILE)
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _of_timm(values: dict) -> dict:
    """Return what a timm model's `pretrained_cfg` says, in the words of preprocessor_config.json."""
    if not values:
        return {}
    size = min(values["input_size"][1:])
    return {
        "image_mean": values.get("mean"),
        "image_std": values.get("std"),
        "size": int(size / (values.get("crop_pct") or 1)),
        "crop_size": size,
        "resample": BILINEAR if values.get("interpolation") == "bilinear" else BICUBIC,
    }


def _side(size) -> int | None:
    """Return the shorter side of a size in a configuration: a number, a list, or a dict of several forms."""
    if isinstance(size, list | tuple):
        return min(size)
    if isinstance(size, dict):
        sides = [size[name] for name in ("shortest_edge", "height", "width") if size.get(name)]
        return min(sides, default=None)
    return size


def stack(images: list["Image"]) -> np.ndarray:
    """Return images of one size as one array of bytes: (rows, channels, height, width)."""
    arrays = [np.asarray(image) for image in images]
    arrays = [array[None] if array.ndim == 2 else array.transpose(2, 0, 1) for array in arrays]
    return np.ascontiguousarray(np.stack(arrays))


def normalize(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return `pixels` in the dtype in which the model computes, with `mean` 0 and `std` 1; on the device.

    So only one byte per value is copied to the device. FSDP2 casts `mean` to its precision, DeepSpeed the weights."""
    weights = next(model.parameters()).dtype
    dtype = weights if weights.itemsize < inputs["mean"].dtype.itemsize else inputs["mean"].dtype
    pixels = inputs["pixels"].to(inputs["mean"].dtype)
    return ((pixels - inputs["mean"].view(-1, 1, 1)) / inputs["std"].view(-1, 1, 1)).to(dtype)
