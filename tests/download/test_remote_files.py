"""Files of a stream behind http: looked up before anything else, told from changed ones, waited for, and read to the end."""

import time

import datasets
import pytest

from src.config.errors import UsageError
from src.data import sources
from src.data.streaming import Stream
from src.download import http_files, remote_files
from src.storage import launch_peers
from tests.helpers import kit
from tests.helpers.fake_hub import Fault, adopt


def put(hub, name: str, first: int, count: int = 20) -> str:
    kit.write_jsonl(hub.folder / "files" / name, [{"input_ids": [first + n, 7, 8]} for n in range(count)])
    return f"{hub.files_url}/{name}"


def _opened(environment, fields, before, then):
    adopt(environment)
    launch_peers.STARTED, http_files.TRIES, remote_files.PATIENCE = time.time(), 2, 20.0
    before()
    try:
        _, splits = kit.open_data(**fields)
        return then(splits["train"])
    except UsageError as error:
        return str(error)


def rows_of(stream: Stream) -> list[int]:
    """Return the first ids of all rows, shard by shard."""
    tables = [table for shard in range(len(stream.shards)) for table in stream.blocks(shard)]
    return [row[0] for table in tables for row in table["input_ids"].to_pylist()]


def facts_of(stream: Stream) -> dict:
    return stream.stats


def opened(hub, folder, files, then=facts_of, before=lambda: None, streaming=True, **more):
    """Return what `then` says of a stream of `files` in a process of its own, or why there is none."""
    fields = {"model_config": hub.folder / "gpt2.yaml", "train_file": files, "streaming": streaming, "max_steps": 3}
    fields |= {"cache_dir": folder / "cache", "global_batch_size": 8} | more
    (found,) = kit.spawn(1, _opened, hub.environment(folder), fields, before, then, out=folder / "out", timeout=40)
    return found


def _blind():
    """The mutant, which knows names only."""
    sources.Source._size = lambda self, file: (None, None)


def test_a_stream_whose_files_changed_is_another_one(hub, tmp_path):
    urls = [put(hub, "a.jsonl", 0), put(hub, "b.jsonl", 20)]
    first, blind = opened(hub, tmp_path, urls), opened(hub, tmp_path, urls, before=_blind)
    assert opened(hub, tmp_path, urls)["rows"] == first["rows"]
    assert first["files"] == {name: (hub.folder / "files" / name).stat().st_size for name in ("a.jsonl", "b.jsonl")}
    put(hub, "b.jsonl", 21, 19)  # another size
    other = opened(hub, tmp_path, urls)
    assert other["files"]["b.jsonl"] != first["files"]["b.jsonl"]
    assert other["rows"] != first["rows"]
    size = (hub.folder / "files/b.jsonl").stat().st_size
    put(hub, "b.jsonl", 22, 19)  # the same size: its ETag is another
    assert (hub.folder / "files/b.jsonl").stat().st_size == size
    assert opened(hub, tmp_path, urls)["rows"] != other["rows"]
    assert opened(hub, tmp_path, urls, before=_blind)["rows"] == blind["rows"]


def test_local_files_of_one_name_are_told_apart_and_all_are_looked_at(tmp_path):
    files = [tmp_path / f"{i % 2}" / f"{i // 2}.jsonl" for i in range(1002)]
    for folder in ("0", "1"):
        (tmp_path / folder).mkdir()
    for i, file in enumerate(files):
        file.write_text("x" * (i + 1))
    source = sources.Source("train_file", list(map(str, files)), "json")
    versions = source.versions()
    assert versions[1] == ("1/0.jsonl", 2, None)
    assert len({name for name, *_ in versions}) == 1002
    files[-1].write_text("")
    assert source.versions() != versions
    assert len(source.sizes()) == 1000  # of those it is said how they changed


def test_a_missing_file_of_a_stream_is_named_before_anything_is_read(hub, tmp_path):
    urls = [put(hub, "here.jsonl", 0), f"{hub.files_url}/nowhere.jsonl"]
    before = len(hub.requests)
    assert opened(hub, tmp_path, urls) == f"train_file: {urls[1]}: the server answers 404 Not Found"
    assert not any(r.method == "GET" and r.matches("/files/here.jsonl") for r in hub.requests[before:])


def test_a_server_that_knows_no_head_is_asked_for_a_byte(hub, tmp_path):
    """As where a URL is signed for GET; the length is that of the file, not that of the answer."""
    url = put(hub, "signed.jsonl", 0)
    told = []
    for refuse in (False, True):
        if refuse:
            hub.faults["/files/signed.jsonl"] = lambda r: Fault(status=403) if r.method == "HEAD" else None
        told.append(remote_files._head(url))
    assert told[0] == told[1]
    assert told[0]["bytes"] == (hub.folder / "files/signed.jsonl").stat().st_size


@pytest.mark.parametrize("streaming", [True, False])
def test_an_empty_file_behind_a_url_is_left_out(hub, tmp_path, streaming):
    urls = [put(hub, "e.jsonl", 0, 0), put(hub, "full.jsonl", 0), put(hub, "f.jsonl", 0, 0)]
    count = (lambda stream: len(rows_of(stream))) if streaming else len
    assert opened(hub, tmp_path, urls, count, streaming=streaming) == 20
    said = (tmp_path / "out/rank0.txt").read_text()
    assert [f"warning: train_file: {url} is empty and left out" in said for url in urls] == [True, False, True]
    told = opened(hub, tmp_path, urls[0], streaming=streaming)
    assert told == f"train_file: {urls[0]} is empty: give a file with at least one row"


def _impatient():
    """The mutant, for which the first fault is the end."""
    remote_files.PATIENCE = 0.0


def test_a_server_that_fails_for_a_while_is_waited_for(hub, tmp_path):
    urls = [put(hub, "one.jsonl", 0), put(hub, "two.jsonl", 20)]
    for before in (lambda: None, _impatient):
        asked = iter(range(1000))  # the first time when it is looked up
        hub.faults["/files/two.jsonl"] = lambda _, asked=asked: Fault(status=500) if 1 <= next(asked) <= 2 else None
        found = opened(hub, tmp_path, urls, rows_of, before)
        said = (tmp_path / "out/rank0.txt").read_text()
        if before is _impatient:
            assert found.startswith(f"train_file: {urls[1]} could not be read")
        else:
            assert found == list(range(40))
            assert said.count(f"warning: {urls[1]}: ") == 1


def _rows_after(change):
    def read(stream):
        change()
        return rows_of(stream)

    return read


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_that_changes_after_its_look_up_is_not_read(hub, tmp_path, kind):
    def table(first: int, count: int) -> str:
        ids = [[first + n, 7, 8] for n in range(count)]
        datasets.Dataset.from_dict({"input_ids": ids}).to_parquet(hub.folder / "files/later.parquet")
        return f"{hub.files_url}/later.parquet"

    new = table if kind == "parquet" else (lambda first, count: put(hub, "later.jsonl", first, count))
    for first, count, said in ((11, 20, "its ETag is"), (10, 30, "it has")):
        url = new(10, 20)
        assert len(opened(hub, tmp_path, url, rows_of)) == 20
        found = opened(hub, tmp_path, url, _rows_after(lambda first=first, count=count: new(first, count)))
        assert f"{url} changed while it was trained on: {said}" in found


def test_another_part_than_asked_for_is_not_read(hub, tmp_path):
    url, size = put(hub, "part.jsonl", 0), (hub.folder / "files/part.jsonl").stat().st_size
    wrong = {"Content-Range": f"bytes 7-{size - 1}/{size}"}
    hub.faults["/files/part.jsonl"] = lambda r: Fault(headers=wrong) if r.method == "GET" and r.range else None
    found = opened(hub, tmp_path, url, rows_of)
    assert f"{url}: the server answers Content-Range: bytes 7-" in found


def test_patience_passes_over_what_has_come_and_ends(monkeypatch):
    monkeypatch.setattr(remote_files, "PATIENCE", 20.0)
    begun = []

    def rows():
        begun.append(len(begun))
        for n in range(6):
            if n == 2 * len(begun):
                raise ConnectionError("reset by peer")
            yield n

    assert list(remote_files.retry_reads(rows, "x")) == list(range(6))
    assert begun == [0, 1, 2]

    def never():
        raise FileNotFoundError("x") from TimeoutError()
        yield

    monkeypatch.setattr(remote_files, "PATIENCE", 1.0)
    began = time.monotonic()
    with pytest.raises(FileNotFoundError):
        list(remote_files.retry_reads(never, "x"))
    assert 0.4 < time.monotonic() - began < 5
    with pytest.raises(ValueError, match="bad row"):  # is not tried again

        def bad():
            begun.append(0)
            raise ValueError("bad row")
            yield

        list(remote_files.retry_reads(bad, "x"))
    assert len(begun) == 4


def test_text_cannot_be_streamed_from_a_server_and_a_bad_line_has_its_own_message(hub, tmp_path):
    (hub.folder / "files/a.txt").write_text("a\nb\n")
    url = f"{hub.files_url}/a.txt"
    assert opened(hub, tmp_path, url).startswith(f"train_file: {url}: a .txt file cannot be streamed from a server")
    url = put(hub, "bad.jsonl", 0)
    with open(hub.folder / "files/bad.jsonl", "a") as file:
        file.write('{"input_ids": [1, 2\n')
    began = time.monotonic()
    said = opened(hub, tmp_path, url)
    assert time.monotonic() - began < 10  # it does not become better
    assert said.startswith(f"train_file: {url} could not be read: JSON parse error")
    assert "encoding" not in said
