"""Image classification with any vision model: cross-entropy, augmentation, mixup, accuracy, and `evaluate` metrics.

A row is {"image": …, "label": "cat"}; the image is an Image column of `datasets`, the label a name or an integer.
Tests: tests/addons/tasks/test_image_classification.py.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from addons.tasks.image_classification import augmentation
from addons.tasks.image_classification.decoding import open_image, read_image
from addons.tasks.image_classification.image_processor import (
    ImageOptions,
    normalize,
    read_image_processor,
    stack,
)
from engine import task as base
from engine.config.errors import warn
from engine.config.option import AS_GIVEN, option
from engine.config.run_config import field_values
from engine.models.build_model import build_model
from engine.models.config_and_tokenizer import load_config
from engine.rows.labels import Labels, labels_of_model, require_columns
from engine.task import Batch
from src.losses.chunked_cross_entropy import Scored, row_losses, sums_from_logits
from src.losses.cross_entropy import at_least_float32, r_drop_option, r_drop_sums, twice
from src.losses.metrics import check_metrics, compute_metrics

HEAD = "ImageClassification"
# Modules that may be new in a pretrained model, also in those of timm.
NEW_HEAD = ("classifier", "head.", "timm_model.fc.")
TOP_FIVE = 10  # smallest number of classes for which top-5 accuracy is reported


@dataclass
class Options(ImageOptions):
    needs_model = True  # model_name_or_path or model_config

    random_crop: float = option("crops of at least this share of the image; 1: none", 0.3, above=0, max=1)
    rand_augment: int = option("RandAugment: operations per image; 0: none", 0, min=0)
    rand_augment_strength: float = option(
        "strength of each RandAugment operation, 0 to 1; the paper's 9 of 30 is 0.3", 0.3, min=0, max=1
    )
    cutout: float = option("CutOut: side of an erased square, as a share of the image's; 0: none", 0.0, min=0, max=1)
    mixup: float = option("mix images; parameter of the Beta distribution; 0: never", 0.0, min=0)
    cutmix: float = option("paste parts of other images; parameter of the Beta distribution; 0: never", 0.0, min=0)
    r_drop_alpha: float = r_drop_option()
    metrics: list[str] = option(
        "metrics besides accuracy: f1 (mean over classes); files of addons/metrics/evaluate/; Hub names or script "
        "paths (code: needs trust_remote_code); or none",
        ["f1"],
        is_path=AS_GIVEN,
        may_change_on_resume=True,
        from_checkpoint=True,
    )


class Task(base.Task):
    parts = ("image", "label")
    new_head = NEW_HEAD
    unit = "images"
    decode_media = False  # prepared rows hold the files as they are, so that crops are of the full image
    are_of_data = False  # the labels, since the first rows are prepared: further sources have the same

    @property
    def labels(self) -> Any:
        """The names of the classes in the order of their ids; None until the data or the model gives them."""
        return self.classes.names

    def load(self) -> None:
        self.config = load_config(self.cfg, None)
        self.image_processor = read_image_processor(self.cfg, self.config, self.options)
        self.metric_names = check_metrics(self.options.metrics, self.cfg.trust_remote_code)
        self.classes = Labels("label")
        if self.cfg.model_name_or_path:
            self.classes = self.classes.of_model(self.config, HEAD)

    # ---- rows --------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        return repr((self.image_processor.channels, self.labels))

    def inspect_columns(self, examples, split: str):
        from datasets import ClassLabel, Features, Value

        needed = require_columns(examples, [*self.parts], split)
        self.classes = self.classes.inspect(examples)
        if self.labels is None or (split == "train" and not self.are_of_data):
            is_stream = split == "train" and field_values(self.cfg).get("streaming")
            if self.labels is None or not is_stream or self.classes.names_of_column is not None:
                values = examples.unique("label")
                labels = self.classes.of_data(self.cfg, values, split)
                if not set(labels) <= set(self.labels or ()):  # other classes than those of the pretrained model
                    self.classes = replace(self.classes, names=labels)
        features = {"image": Value("binary"), "label": ClassLabel(names=self.labels)}
        return needed, Features(features | {name: Value("int64") for name in ("length", "targets", "cut")})

    def encode(self, batch: dict[str, list], locations) -> dict[str, list]:
        channels = self.image_processor.channels
        images = [read_image(v, "image", channels, locations[i])[0] for i, v in enumerate(batch["image"])]
        ids = self.classes.ids(batch["label"], locations)
        ones = [1] * len(ids)  # all inputs have one size, so the length of a row is one image
        return {"image": images, "label": ids, "length": ones, "targets": ones, "cut": [0] * len(ids)}

    def on_prepared(self, features) -> None:
        self.classes = replace(self.classes, names=features["label"].names)
        self.are_of_data = True

    def on_train_data(self, train_set) -> None:
        self.options.set_classes(self.labels, train_set, "label")

    # ---- model and loss ----------------------------------------------------------------------------------------------

    def build(self, weights: str | None = None, empty: bool = False) -> torch.nn.Module:
        from transformers import AutoModelForImageClassification

        of_model = labels_of_model(self.config, HEAD) if self.cfg.model_name_or_path else None
        if of_model and of_model != self.labels:
            warn(f"the {len(of_model)} classes of the model are replaced by the {len(self.labels)} classes of the data")
        self.classes.write_to(self.config)
        return build_model(self.cfg, self.config, AutoModelForImageClassification, weights, NEW_HEAD, empty)

    def collate(self, rows: list[dict[str, np.ndarray]], training: bool) -> Batch:
        o, processor, images = self.options, self.image_processor, []
        for row in rows:
            image = open_image(row["image"], processor.channels, 2 * processor.size if training else None)
            if training and o.random_crop < 1:
                image = augmentation.random_resized_crop(image, processor.size, o.random_crop, processor.resample)
            else:
                image = processor.center(image)
            if training:
                image = augmentation.random_flip(image, o.horizontal_flip)
                image = augmentation.rand_augment(image, o.rand_augment, o.rand_augment_strength, processor.mean)
                image = augmentation.cutout(image, o.cutout, processor.mean)
            images.append(image)
        pixels, labels = stack(images), np.array([int(row["label"]) for row in rows])
        inputs, others, shares = {"labels": labels}, labels, np.ones(len(rows), np.float32)
        if training:
            pixels, other, shares = augmentation.mix(pixels, o.mixup, o.cutmix)
            others, shares = labels[other], shares.astype(np.float32)
            inputs |= {"other_labels": others, "shares": shares}
        weight = o.weigh(training, labels, others, shares)
        tensors = {name: torch.from_numpy(value) for name, value in (inputs | {"pixels": pixels}).items()}
        tensors |= processor.scale(getattr(torch, self.cfg.dtype))
        return Batch(tensors, weight, tokens=len(rows), padded_tokens=len(rows))

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        alpha, pixels = self.options.r_drop_alpha, normalize(model, inputs)
        if model.training:
            rows = {name: inputs[name] for name in ("labels", "other_labels", "shares")} | {"pixels": pixels}
            labels, others, shares, pixels = (twice(rows) if alpha else rows).values()
            logits = model(pixel_values=pixels).logits
            # Rows are a mixture (mixup): `shares` of `labels`, the rest of `others`.
            own, other = (self.options.per_target(at_least_float32(logits), x) for x in (labels, others))
            sums = {name: (shares * own[name] + (1 - shares) * other[name]).sum() for name in own}
            return r_drop_sums(sums, logits, alpha) if alpha else sums
        labels, logits = inputs["labels"], model(pixel_values=pixels).logits
        sums = sums_from_logits(logits, labels, False) | {"prediction": logits.argmax(-1), "label": labels}
        if len(self.labels) >= TOP_FIVE:
            sums["correct_in_five"] = (logits.topk(5).indices == labels[:, None]).double().sum()
        return sums

    def row_losses(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        logits, shares = model(pixel_values=normalize(model, inputs)).logits, inputs["shares"]
        targets = (inputs["labels"], inputs["other_labels"])
        own, other = (row_losses(Scored(logits), labels, self.options) for labels in targets)
        return {name: shares * own[name] + (1 - shares) * other[name] for name in own}

    # ---- results -----------------------------------------------------------------------------------------------------

    def metrics(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        numbers = {"accuracy": sums["correct"] / weight}
        return numbers | ({"top5_accuracy": sums["correct_in_five"] / weight} if "correct_in_five" in sums else {})

    def row_metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        predictions, labels = rows["prediction"].tolist(), rows["label"].tolist()
        return compute_metrics(self.metric_names, predictions, labels, self.cfg.trust_remote_code)
