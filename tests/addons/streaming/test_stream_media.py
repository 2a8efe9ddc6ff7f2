"""Rows of a stream with images and messages: the same objects for `encode` as from prepared files."""

import datasets
import numpy as np
import PIL.Image
import pytest

from engine.rows import prepared_split
from tests.engine.rows.test_media import Pictures, opened
from tests.helpers import images, kit

STREAM = {"streaming": True, "max_steps": 1}


@pytest.fixture
def folder(tmp_path):
    images.write_pictures(tmp_path / "train.parquet", 40)
    return tmp_path


def test_streams_hand_over_what_prepared_data_does(folder):
    task, splits = opened(Pictures, folder)
    stream_task, streams = opened(Pictures, folder, **STREAM)
    assert {type(value) for value in task.seen} == {type(value) for value in stream_task.seen}
    assert all(isinstance(value, PIL.Image.Image) for value in task.seen)
    shards = streams["train"].shards
    rows = sorted(shards.prepare(next(shards.blocks(0)), 0, 0, 0), key=lambda row: row[0])
    for row, (_, other, _) in zip(splits["train"].rows(np.arange(40)), rows, strict=True):
        assert (row["flat"] == other["flat"]).all()
        assert not row["flat"].flags.owndata  # views of the memory-mapped file


def test_messages_of_a_stream_are_decoded(tmp_path):
    """`datasets` stores messages with different keys as JSON texts; a stream handed over the texts."""
    rows = [{"messages": [{"role": "user", "content": "a", "n": 1}]}, {"messages": [{"role": "user", "content": "b"}]}]
    rows += [{"messages": [{"role": "user", "content": [{"type": "text"}]}]}]
    file = kit.write_jsonl(tmp_path / "train.jsonl", rows)

    class Chats(Pictures):
        def inspect_columns(self, examples, split):
            return ["messages"], datasets.Features(dict.fromkeys(prepared_split.COUNTS, datasets.Value("int64")))

        def encode(self, batch, locations):
            self.seen += batch["messages"]
            return {name: [1] * len(locations) for name in prepared_split.COUNTS}

    task, _ = opened(Chats, tmp_path, train_file=[str(file)])
    stream_task, _ = opened(Chats, tmp_path, train_file=[str(file)], **STREAM)
    assert task.seen == stream_task.seen[: len(task.seen)]
    assert task.seen[2][0]["content"] == [{"type": "text"}]
