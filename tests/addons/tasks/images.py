"""Data, models and flags of the image tasks for tests."""

from importlib import import_module

import datasets
import numpy as np

from samples import drawn_shapes
from tests.helpers import kit
from tests.helpers.images import CLASSES, picture, write_pictures  # noqa: F401 (tests import all names from here)

VIT = {
    "model_type": "vit",
    "image_size": 16,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def import_before_fork(*model_types: str) -> None:
    """Import the code of the task and of these models in this process, which saves seconds in every run."""
    for name in ("addons.tasks.image_classification", *(f"transformers.models.{t}.modeling_{t}" for t in model_types)):
        import_module(name)


def segmentation_flags(folder, **fields) -> list[str]:
    """Write 203 and 31 drawn images of 24 to 64 pixels and their classes; return flags of segmentation."""
    features = datasets.Features(image=datasets.Image(), label=datasets.Image())
    for split, count in (("train", 203), ("validation", 31)):
        generator = np.random.default_rng(count)
        pairs = [drawn_shapes.draw_shapes(generator, i) for i in range(count)]
        pairs = [[one.crop((0, 0, 8 + i % 13, 8 + i % 7)) for one in pair] for i, pair in enumerate(pairs)]
        rows = {name: [pair[i] for pair in pairs] for i, name in enumerate(("image", "label"))}
        datasets.Dataset.from_dict(rows, features).to_parquet(folder / f"{split}.parquet")
    return kit.flags(
        **{
            "task": "segmentation",
            "num_classes": 4,
            "unet_widths": [4, 8],
            "train_file": folder / "train.parquet",
            "validation_file": folder / "validation.parquet",
        }
        | fields
    )


def classification_flags(folder, **fields) -> list[str]:
    """Write 203 and 31 images and a tiny ViT; return flags of image_classification."""
    for split, count in (("train", 203), ("validation", 31)):
        write_pictures(folder / f"{split}.parquet", count, seed=count)
    return kit.flags(
        **{
            "task": "image_classification",
            "model_config": kit.write_yaml(folder / "model.yaml", VIT),
            "train_file": folder / "train.parquet",
            "validation_file": folder / "validation.parquet",
            "metrics": "none",
        }
        | fields
    )
