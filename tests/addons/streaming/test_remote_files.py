"""Files of a stream behind http: looked up before training, and refused once they change."""

import datasets
import pytest

from addons.streaming.sources import StreamSource
from addons.streaming.stream import Stream
from tests.addons.streaming.served_data import open_served
from tests.helpers import kit


def put(hub, name: str, first: int, count: int = 20) -> str:
    kit.write_jsonl(hub.folder / "files" / name, [{"input_ids": [first + n, 7, 8]} for n in range(count)])
    return f"{hub.files_url}/{name}"


def rows_of(stream: Stream) -> list[int]:
    """Return the first ids of all rows, shard by shard."""
    blocks = [block for shard in range(len(stream.shards)) for block in stream.shards.blocks(shard)]
    return [row.values["input_ids"][0] for block in blocks for row in block]


def ignore_versions():
    """The mutant, which knows file names only."""
    StreamSource._size = lambda self, file: (None, None)


def test_stream_of_changed_files_is_another_one(hub, tmp_path):
    urls = [put(hub, "a.jsonl", 0), put(hub, "b.jsonl", 20)]
    first, mutant = open_served(hub, tmp_path, urls), open_served(hub, tmp_path, urls, before=ignore_versions)
    assert open_served(hub, tmp_path, urls)["rows"] == first["rows"]
    put(hub, "b.jsonl", 21, 19)  # another size
    other = open_served(hub, tmp_path, urls)
    assert other["rows"] != first["rows"]
    put(hub, "b.jsonl", 22, 19)  # the same size, another ETag
    assert open_served(hub, tmp_path, urls)["rows"] != other["rows"]
    assert open_served(hub, tmp_path, urls, before=ignore_versions)["rows"] == mutant["rows"]


def test_empty_file_is_refused(hub, tmp_path):
    urls = [put(hub, "full.jsonl", 0), put(hub, "e.jsonl", 0, 0)]
    assert open_served(hub, tmp_path, urls).startswith(f"train_file: {urls[1]} is empty")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_file_that_changes_after_its_look_up_is_refused(hub, tmp_path, kind):
    def table(first: int, count: int) -> str:
        ids = [[first + n, 7, 8] for n in range(count)]
        datasets.Dataset.from_dict({"input_ids": ids}).to_parquet(hub.folder / "files/later.parquet")
        return f"{hub.files_url}/later.parquet"

    new = table if kind == "parquet" else (lambda first, count: put(hub, "later.jsonl", first, count))
    for first, count, words in ((11, 20, "its ETag is"), (10, 30, "its size is")):
        url = new(10, 20)

        def rows_after_a_change(stream, first=first, count=count):
            new(first, count)
            return rows_of(stream)

        assert len(open_served(hub, tmp_path, url, rows_of)) == 20
        found = open_served(hub, tmp_path, url, rows_after_a_change)
        assert f"{url} changed while it was read: {words}" in found
