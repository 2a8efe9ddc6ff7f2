# Needs addons/tasks/image_classification/.
"""Semantic segmentation: a class for every pixel; cross-entropy over the labeled pixels, mean IoU, pixel accuracy.

A row is {"image": …, "label": …}: an image, and an image of the same size with class ids as pixels. Without a model
in the run file, a small U-Net takes images of their own sizes; padding has no effect on it. Models of transformers
have no mask for padding, so they need --image_size: all images are resized. Tests: tests/addons/tasks/test_segmentation.py.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from addons.tasks.image_classification import decoding
from addons.tasks.image_classification.decoding import open_image, read_image
from addons.tasks.image_classification.image_processor import ImageOptions, normalize, read_image_processor
from addons.tasks.segmentation import segments
from addons.tasks.segmentation.masked_unet import MaskedUNet
from engine import task as base
from engine.config.errors import UsageError
from engine.config.option import option
from engine.models.build_model import build_model, build_plain_model, saved_config
from engine.models.config_and_tokenizer import load_config
from engine.rows.labels import labels_of_model, require_columns, set_labels
from engine.task import Batch
from src.losses.chunked_cross_entropy import sums_from_logits
from src.losses.cross_entropy import at_least_float32

HEAD = "SemanticSegmentation"
NEW_HEAD = ("decode_head", "classifier", "auxiliary_head")  # modules that may be new in a pretrained model


@dataclass
class Options(ImageOptions):
    class_names: list[str] = option("names of the classes, by their pixel value", [], from_checkpoint=True)
    num_classes: int | None = option("number of classes, if they have no names", min=2)
    ignored_value: int = option("pixel value of the label without a class", 255, min=0, max=255)
    unet_widths: list[int] = option("channels of each level of the U-Net", [16, 32, 64], from_checkpoint=True)
    random_crop: float = option("crops of at least this share of the image; 1: none", 0.5, above=0, max=1)
    dice_loss: float = option(
        "weight of 1 − the soft Dice coefficient of each image, averaged by labeled pixels, in the training loss",
        0.0,
        min=0,
    )


class Task(base.Task):
    parts = ("image", "label")  # both images, the label of class ids
    new_head = NEW_HEAD

    decode_media = False
    encode_helpers = (decoding,)
    unit = "pixels"
    pipeline_tag = "image-segmentation"
    cut_by_cost = False  # widths and heights are padded apart

    def load(self) -> None:
        o, saved = self.options, saved_config(self.cfg)
        names = o.class_names or [str(i) for i in range(o.num_classes or 0)]
        self.is_plain = not self.cfg.model_config and ("widths" in saved or not self.cfg.model_name_or_path)
        if self.is_plain:
            self.config: Any = SimpleNamespace(num_channels=3)
            self.widths, self.classes = saved.get("widths", o.unet_widths), names or saved.get("classes", [])
            self.multiple = 2 ** (len(self.widths) - 1)  # what height and width of a micro-batch must divide by
        else:
            self.config, self.multiple = load_config(self.cfg, None), 1
            self.classes = names or labels_of_model(self.config, HEAD) or []
            if not o.image_size:
                raise UsageError(
                    f"image_size is not set: {self.config.model_type} has no mask for padding, so the loss of an image "
                    "would depend on those beside it: give --image_size, or no model for the U-Net"
                )
        if len(self.classes) < 2:
            raise UsageError("the classes are unknown: give class_names or num_classes")
        o.set_classes(self.classes)
        self.processor = read_image_processor(self.cfg, self.config, o)
        self.processor.is_square = True
        self.image_processor = None if self.is_plain else self.processor  # final/ holds it for `pipeline`

    # ---- rows --------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        o = self.options
        return repr((o.image_size, o.ignored_value, len(self.classes)))

    def inspect_columns(self, examples, split: str):
        from datasets import Features, Value

        needed = require_columns(examples, [*self.parts], split)
        features = {name: Value("binary") for name in ("image", "label")}
        return needed, Features(features | {name: Value("int64") for name in ("length", "targets", "cut")})

    def encode(self, batch: dict[str, list], locations) -> dict[str, list]:
        o, made = self.options, {name: [] for name in ("image", "label", "length", "targets", "cut")}
        for i, (value, mask) in enumerate(zip(batch["image"], batch["label"], strict=True)):
            image, size = read_image(value, "image", self.processor.channels, locations[i])
            label, ids = segments.read_label(mask, "label", size, len(self.classes), o.ignored_value, locations[i])
            width, height = (o.image_size, o.image_size) if o.image_size else size
            row = (image, label, width * height, int((ids != o.ignored_value).sum()), 0)
            for column, item in zip(made.values(), row, strict=True):
                column.append(item)
        return made

    # ---- model and loss ----------------------------------------------------------------------------------------------

    def build(self, weights: str | None = None, empty: bool = False) -> torch.nn.Module:
        if self.is_plain:
            make = lambda: MaskedUNet(self.processor.channels, len(self.classes), self.widths)  # noqa: E731
            return build_plain_model(self.cfg, make, weights, empty)
        from transformers import AutoModelForSemanticSegmentation

        set_labels(self.config, self.classes)
        return build_model(self.cfg, self.config, AutoModelForSemanticSegmentation, weights, NEW_HEAD, empty)

    def model_config(self) -> dict[str, Any]:
        return {"widths": self.widths, "classes": self.classes}

    def collate(self, rows: list[dict[str, np.ndarray]], training: bool) -> Batch:
        o, pairs = self.options, []
        for row in rows:
            pair = open_image(row["image"], self.processor.channels), segments.open_label(row["label"])
            if training:
                pair = segments.random_view(*pair, o.random_crop, o.horizontal_flip)
            pairs.append(segments.resize(*pair, o.image_size, self.processor.resample) if o.image_size else pair)
        inputs = segments.pad(pairs, self.multiple, o.ignored_value)
        weight = o.weigh(training, inputs["labels"].numpy())
        scale = self.processor.scale(getattr(torch, self.cfg.dtype))
        return Batch(scale | inputs, weight, int(inputs["mask"].sum()), padded_tokens=inputs["mask"].numel())

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        pixels, labels = normalize(model, inputs), inputs["labels"]
        if self.is_plain:
            logits = at_least_float32(model(pixels, inputs["mask"]))
        else:
            logits = at_least_float32(model(pixel_values=pixels).logits)  # some models give a lower resolution
            logits = F.interpolate(logits, labels.shape[-2:], mode="bilinear", align_corners=False)
        if model.training:
            return self._training_sums(logits, labels)
        loss = F.cross_entropy(logits, labels, reduction="none", ignore_index=segments.IGNORED)
        return {"loss": loss.double().sum()} | segments.overlaps(logits.argmax(1), labels, len(self.classes))

    def _training_sums(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        o = self.options
        if o.is_plain_loss:
            sums = {"loss": F.cross_entropy(logits, labels, reduction="sum", ignore_index=segments.IGNORED)}
        else:
            by_pixel = logits.movedim(1, -1).flatten(0, -2)
            sums = sums_from_logits(by_pixel, labels.flatten(), True, o)
        if not o.dice_loss:
            return sums
        dice = (segments.dice_losses(logits, labels) * (labels != segments.IGNORED).sum((1, 2))).sum()
        return sums | {"loss": sums["loss"] + o.dice_loss * dice, "dice_loss": dice.detach()}

    def metrics(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        return segments.scores(sums, weight, self.classes)
