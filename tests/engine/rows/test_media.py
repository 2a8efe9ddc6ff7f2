"""A broken image is named. What `encode` and `collate` get of images: tests/addons/streaming/test_stream_media.py."""

import datasets
import numpy as np
import pytest

from engine import task as base
from engine.config.errors import UsageError
from engine.config.find_addons import run_config
from engine.plan.dataset import prepare_datasets
from engine.rows import prepared_split
from tests.helpers import images


class Pictures(base.Task):
    """A task as a fork may write it: decoded images in, flat arrays out."""

    seen: list

    def load(self):
        self.seen = []

    def fingerprint(self):
        return ""

    def inspect_columns(self, examples, split):
        features = {"flat": datasets.List(datasets.Value("uint8"))}
        return ["image"], datasets.Features(features | dict.fromkeys(prepared_split.COUNTS, datasets.Value("int64")))

    def encode(self, batch, locations):
        self.seen += batch["image"]
        flat = [np.asarray(image).reshape(-1) for image in batch["image"]]
        ones = [1] * len(flat)
        return {"flat": flat, "length": ones, "targets": ones, "cut": ones}


def opened(task_class, folder, **fields):
    fields = {"train_file": [str(folder / "train.parquet")], "cache_dir": str(folder / "cache")} | fields
    cfg = run_config(**fields)
    task = task_class(cfg, None)
    return task, prepare_datasets(cfg, task)


def test_broken_image_is_named(tmp_path):
    rows = [{"image": images.picture(np.random.default_rng(i), 0)} for i in range(5)]
    rows[3] = {"image": {"bytes": b"no image", "path": None}}
    datasets.Dataset.from_list(rows, datasets.Features(image=datasets.Image())).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(UsageError, match=r"train.parquet, row 3: .*cannot be decoded"):
        opened(Pictures, tmp_path)
