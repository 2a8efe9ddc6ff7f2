"""Data, models and flags of the image tasks for tests."""

from importlib import import_module
from pathlib import Path

import datasets
import numpy as np

from samples import drawn_shapes
from tests.helpers import kit, technique_runs
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

CONVNEXT = {
    "model_type": "convnext",
    "image_size": 16,
    "patch_size": 2,
    "num_stages": 2,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
}


def import_before_fork(*model_types: str) -> None:
    """Import the code of the task and of these models in this process, which saves seconds in every run."""
    for name in ("addons.tasks.image_classification", *(f"transformers.models.{t}.modeling_{t}" for t in model_types)):
        import_module(name)


def segmentation_fields(folder, **more) -> dict:
    """Write 203 and 31 drawn images of 24 to 64 pixels and their classes; return fields of segmentation."""
    features = datasets.Features(image=datasets.Image(), label=datasets.Image())
    for split, count in (("train", 203), ("validation", 31)):
        generator = np.random.default_rng(count)
        pairs = [drawn_shapes.draw_shapes(generator, i) for i in range(count)]
        pairs = [[one.crop((0, 0, 8 + i % 13, 8 + i % 7)) for one in pair] for i, pair in enumerate(pairs)]
        rows = {name: [pair[i] for pair in pairs] for i, name in enumerate(("image", "label"))}
        datasets.Dataset.from_dict(rows, features).to_parquet(folder / f"{split}.parquet")
    files = {f"{split}_file": folder / f"{split}.parquet" for split in ("train", "validation")}
    return {"task": "segmentation", "num_classes": 4, "unet_widths": [4, 8]} | files | more


def write_classification(folder) -> Path:
    """Write 203 and 31 images and a tiny ViT; return the folder."""
    for split, count in (("train", 203), ("validation", 31)):
        write_pictures(folder / f"{split}.parquet", count, seed=count)
    kit.write_yaml(folder / "model.yaml", VIT)
    return folder


def classification_fields(folder, **more) -> dict:
    """Return fields of image_classification for a folder with these files; None removes one."""
    fields = {"task": "image_classification", "model_config": folder / "model.yaml", "metrics": "none"}
    fields |= {f"{split}_file": folder / f"{split}.parquet" for split in ("train", "validation")}
    return {name: value for name, value in (fields | more).items() if value is not None}


def run_fields(folder, **more) -> dict:
    """Return fields of a run on 16 images, all of them in each global batch, without augmentation."""
    kit.need_task("image_classification")
    import_before_fork("convnext", "vit")
    write_pictures(folder / "train.parquet", technique_runs.ROWS)
    kit.write_yaml(folder / "model.yaml", CONVNEXT)
    return (
        classification_fields(folder, validation_file=None)
        | {
            "random_crop": 1,
            "horizontal_flip": 0,
            "dtype": "float64",
            "global_batch_size": technique_runs.ROWS,
            "max_steps": technique_runs.STEPS,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "save_steps": 2,
            "save_total_limit": 10,
        }
        | more
    )
