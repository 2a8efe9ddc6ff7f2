"""Rows with images and arrays: the same objects for `encode` from files and streams, written and read without copies."""

from pathlib import Path

import datasets
import numpy as np
import PIL.Image
import pytest

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.data import arrow_columns, prepared_pieces, preprocessing
from src.data.data_stats import repeated
from src.data.dataset import prepare_datasets
from src.tasks import base
from tests.helpers import images, kit

SHAPE = (18, 20, 3)


class Pictures(base.Task):
    """A task as a fork may write it: decoded images in, arrays of one shape out."""

    seen: list

    def load(self):
        self.seen = []

    def fingerprint(self):
        return ""

    def inspect_columns(self, examples, split, whole=True):
        features = {"pixels": datasets.Array3D(SHAPE, "uint8"), "flat": datasets.List(datasets.Value("uint8"))}
        return ["image"], datasets.Features(features | dict.fromkeys(arrow_columns.COUNTS, datasets.Value("int64")))

    def encode(self, batch, locations):
        self.seen += batch["image"]
        pixels = [np.asarray(image) for image in batch["image"]]
        ones = [1] * len(pixels)
        flat = [array.reshape(-1) for array in pixels]
        return {"pixels": pixels, "flat": flat, "length": ones, "targets": ones, "cut": ones}


class Encoded(Pictures):
    decode_media = False

    def encode(self, batch, locations):
        decoded = super().encode({"image": [PIL.Image.new("RGB", SHAPE[1::-1])] * len(locations)}, locations)
        self.seen = batch["image"]
        return decoded


def opened(task_class, folder, **fields):
    fields = {"train_file": [str(folder / "train.parquet")], "cache_dir": str(folder / "cache")} | fields
    cfg = RunConfig(**fields)
    task = task_class(cfg, None)
    return task, prepare_datasets(cfg, task)


@pytest.fixture
def folder(tmp_path) -> Path:
    images.write_pictures(tmp_path / "train.parquet", 40)
    return tmp_path


def test_streams_hand_over_what_prepared_data_does(folder):
    task, splits = opened(Pictures, folder)
    stream_task, streams = opened(Pictures, folder, streaming=True, max_steps=1)
    assert {type(value) for value in task.seen} == {type(value) for value in stream_task.seen}
    assert all(isinstance(value, PIL.Image.Image) for value in task.seen)
    shards = streams["train"].shards
    rows = sorted(shards.prepare(next(shards.blocks(0)), 0, 0, 0), key=lambda row: row[0])
    for row, (_, other, _) in zip(splits["train"].rows(np.arange(40)), rows, strict=True):
        assert (row["pixels"] == other["pixels"]).all()
        assert (row["flat"].reshape(SHAPE) == row["pixels"]).all()
        assert row["pixels"].shape == SHAPE
        assert not row["pixels"].flags.owndata  # views of the memory-mapped file
        assert not row["flat"].flags.owndata


def test_images_can_stay_encoded(folder):
    for fields in ({}, {"streaming": True, "max_steps": 1}):
        task, _ = opened(Encoded, folder, **fields)
        assert all(value["bytes"][:4] == b"\x89PNG" for value in task.seen)


def test_messages_of_a_stream_are_decoded(tmp_path):
    """`datasets` stores messages with different keys as JSON texts; a stream handed over the texts."""
    rows = [{"messages": [{"role": "user", "content": "a", "n": 1}]}, {"messages": [{"role": "user", "content": "b"}]}]
    rows += [{"messages": [{"role": "user", "content": [{"type": "text"}]}]}]
    file = kit.write_jsonl(tmp_path / "train.jsonl", rows)

    class Chats(Pictures):
        def inspect_columns(self, examples, split, whole=True):
            return ["messages"], datasets.Features(dict.fromkeys(arrow_columns.COUNTS, datasets.Value("int64")))

        def encode(self, batch, locations):
            self.seen += batch["messages"]
            return {name: [1] * len(locations) for name in arrow_columns.COUNTS}

    task, _ = opened(Chats, tmp_path, train_file=[str(file)])
    stream_task, _ = opened(Chats, tmp_path, train_file=[str(file)], streaming=True, max_steps=1)
    assert task.seen == stream_task.seen[: len(task.seen)]
    assert task.seen[2][0]["content"] == [{"type": "text"}]


def test_broken_image_is_named(folder):
    values = [{"bytes": images_bytes(i), "path": None} for i in range(5)]
    values[3] = {"bytes": values[3]["bytes"][:60], "path": None}
    features = datasets.Features(image=datasets.Image(decode=False))
    datasets.Dataset.from_dict({"image": values}, features).cast_column("image", datasets.Image()).to_parquet(
        folder / "broken.parquet"
    )
    for fields in ({}, {"streaming": True, "max_steps": 1}):
        with pytest.raises(UsageError, match=r"broken.parquet, row 3: .*cannot be decoded"):
            opened(Pictures, folder, train_file=[str(folder / "broken.parquet")], **fields)


def images_bytes(seed: int) -> bytes:
    import io

    file = io.BytesIO()
    images.picture(np.random.default_rng(seed), 0).save(file, "PNG")
    return file.getvalue()


def test_arrays_with_equal_corners_are_not_duplicates(folder, monkeypatch):
    """The mutant compares the repr of an array, which omits its middle."""
    pictures = [np.full(SHAPE, 255, np.uint8) for _ in range(4)]
    for i, picture in enumerate(pictures):
        picture[8:10, 8:10] = i
    features = datasets.Features(image=datasets.Image())
    for name, chosen in (("train", pictures[:2]), ("validation", pictures[1:])):
        rows = {"image": [PIL.Image.fromarray(picture) for picture in chosen]}
        datasets.Dataset.from_dict(rows, features).to_parquet(folder / f"{name}.parquet")
    files = {"validation_file": [str(folder / "validation.parquet")]}
    _, splits = opened(Pictures, folder, **files)
    assert repeated(splits) == (1, 3)
    monkeypatch.setattr(prepared_pieces, "_value_bytes", lambda value: repr(value).encode())
    _, splits = opened(Pictures, folder, **files, cache_dir=str(folder / "other"))
    assert repeated(splits) == (3, 3)


def test_size_of_image_files_counts(folder):
    """A folder of images holds paths: without the size of the files, ten thousand images would be one block."""
    for i in range(30):
        target = folder / "pictures" / "train" / "ab"[i % 2]
        target.mkdir(parents=True, exist_ok=True)
        (target / f"{i}.png").write_bytes(images_bytes(i))
    rows = datasets.load_dataset(str(folder / "pictures"), split="train", cache_dir=str(folder / "cache"))
    total = sum(path.stat().st_size for path in target.parent.rglob("*.png"))
    assert preprocessing.bytes_in_files(rows) == total
    assert preprocessing.bytes_in_files(rows.select_columns(["label"])) == 0
