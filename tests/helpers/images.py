"""Image data for tests: noisy squares and stripes, written as Parquet with columns of `datasets`."""

from importlib import import_module
from pathlib import Path

import datasets
import numpy as np
from PIL import Image

from samples import drawn_shapes
from tests.helpers import kit

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
CLASSES = ["rows", "columns", "plain"]


def import_before_fork(*model_types: str) -> None:
    """Import the code of the task and of these models in this process, which saves seconds in every run."""
    for name in ("src.tasks.image_classification", *(f"transformers.models.{t}.modeling_{t}" for t in model_types)):
        import_module(name)


def picture(generator, label: int, width: int = 20, height: int = 18) -> Image.Image:
    """Return noise with bright rows, bright columns, or nothing."""
    pixels = generator.integers(0, 120, (height, width, 3))
    pixels[::4] += 100 * (label == 0)
    pixels[:, ::4] += 100 * (label == 1)
    return Image.fromarray(pixels.astype(np.uint8))


def write_pictures(path, count: int, seed: int = 0) -> Path:
    """Write rows of image and label."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 3, count).tolist()
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=CLASSES))
    rows = {"image": [picture(generator, label) for label in labels], "label": labels}
    datasets.Dataset.from_dict(rows, features).to_parquet(path)
    return Path(path)


def segmentation_flags(folder, **fields) -> list[str]:
    """Write 203 and 31 drawn images of 24 to 64 pixels and their classes; return flags of segmentation."""
    kit.need_task("segmentation")
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
    kit.need_task("image_classification")
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
