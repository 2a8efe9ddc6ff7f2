"""Files behind URLs: downloaded once by all processes of a disk, complete or absent, and again once they change."""

import os
import time
from pathlib import Path

import pytest

from src.config.errors import UsageError
from src.storage import http_files
from src.storage import hub as hub_module
from tests.helpers import kit
from tests.helpers.fake_hub import Fault, adopt

MB = 1 << 20


def serve(hub, name: str, content: bytes) -> str:
    """Serve a file; return its URL."""
    time.sleep(0.01)  # so that it is younger than a file of the same name
    (hub.folder / "files" / name).write_bytes(content)
    return f"{hub.files_url}/{name}"


def gets(hub, name: str, since: int = 0) -> list[int]:
    """Return the status of each GET of a file."""
    return [r.status for r in hub.requests[since:] if r.method == "GET" and r.matches(f"/files/{name}")]


# ---- one process -----------------------------------------------------------------------------------------------------


def content_of(url: str, cache: Path) -> bytes:
    return Path(http_files.fetch_file(url, "train_file", cache)).read_bytes()


@pytest.fixture
def fetch(tmp_path, monkeypatch):
    """Return a function that downloads a URL as a new process would and returns the content."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(http_files, "is_offline", lambda: False)
    monkeypatch.setattr(http_files, "TRIES", 2)
    monkeypatch.setattr(hub_module, "records", {})

    def fetch(url: str) -> bytes:
        hub_module.records.clear()
        return content_of(url, tmp_path / "cache")

    return fetch


def test_changed_file_is_downloaded_again(hub, fetch, tmp_path, monkeypatch):
    """Here or on the server."""
    url = serve(hub, "changing", b"one")
    assert fetch(url) == fetch(url) == b"one"
    assert len(gets(hub, "changing")) == 1
    (copy,) = tmp_path.rglob("downloads/*/file")
    os.truncate(copy, 2)
    assert fetch(url) == b"one"
    serve(hub, "changing", b"two")
    assert fetch(url) == b"two"
    serve(hub, "changing", b"new")
    monkeypatch.setattr(http_files, "_is_current", lambda *_: True)  # the mutant
    assert fetch(url) == b"two"


HTML = {"Content-Type": "text/html; charset=utf-8"}


def test_offline_no_server_is_asked(hub, fetch, monkeypatch):
    url = serve(hub, "known", b"rows")
    fetch(url)
    monkeypatch.setattr(http_files, "is_offline", lambda: True)
    before = len(hub.requests)
    assert fetch(url) == b"rows"
    with pytest.raises(UsageError, match="new: not fetched: HF_HUB_OFFLINE is set"):
        fetch(serve(hub, "new", b"rows"))
    assert len(hub.requests) == before


def test_file_without_etag_and_time_is_downloaded_each_time(hub, fetch):
    """Rows that are called a web page are rows."""
    url = serve(hub, "unknown", b"one")
    hub.faults["/files/unknown"] = Fault(headers={"ETag": 'W/"weak"', "Last-Modified": ""} | HTML)
    for content in (b"one", b"two"):
        serve(hub, "unknown", content)
        assert fetch(url) == content


@pytest.mark.parametrize(
    "fault, text",
    [
        ({"status": 404}, "the server answers 404"),
        ({"status": 202}, "the server answers 202"),  # it prepares the file, and may send a row that says so
        ({"headers": HTML}, "web page"),
    ],
)
def test_answer_without_the_file_is_refused(hub, fetch, tmp_path, fault, text):
    url = serve(hub, "refused", b"\n<!DOCTYPE html><html>Sign in</html>")
    hub.faults["/files/refused"] = Fault(**fault)
    with pytest.raises(UsageError, match=f"train_file: {url}: .*{text}"):
        fetch(url)
    assert not list(tmp_path.rglob("fetched.json"))


def test_interrupted_download_is_given_up_or_begins_again(hub, fetch, tmp_path):
    content, url = os.urandom(3 * MB), f"{hub.files_url}/interrupted"
    serve(hub, "interrupted", content)
    hub.faults["/files/interrupted"] = Fault(close_after=2 * MB)
    with pytest.raises(UsageError, match=f"{url}: not fetched"):
        fetch(url)
    assert not list(tmp_path.rglob("fetched.json"))
    hub.faults["/files/interrupted"] = Fault(close_after=2 * MB, times=1)
    assert fetch(url) == content
    assert gets(hub, "interrupted") == [200] * 4  # from the start of the file, not 206


def test_silent_server_is_given_up(hub, fetch, monkeypatch):
    monkeypatch.setattr(http_files, "TIMEOUT", (1, 1))
    monkeypatch.setattr(http_files, "TRIES", 1)
    hub.faults["/files/silent"] = Fault(silent=True)
    with pytest.raises(UsageError, match="silent: not available"):
        fetch(serve(hub, "silent", b"rows"))


def test_file_of_a_store(fetch, monkeypatch):
    """`memory://` stands for s3:// and gs://."""
    import fsspec

    store = fsspec.filesystem("memory")
    store.pipe("/a.jsonl", b"rows")
    assert fetch("memory://a.jsonl") == b"rows"
    with pytest.raises(UsageError, match="train_file: memory://missing: not available"):
        fetch("memory://missing")
    monkeypatch.setattr(type(store), "get_file", lambda self, remote, local, **_: Path(local).write_bytes(b"o"))
    store.pipe("/b.jsonl", b"longer")
    with pytest.raises(UsageError, match="1 of 6 bytes"):
        fetch("memory://b.jsonl")


# ---- processes -------------------------------------------------------------------------------------------------------


def fetch_in_process(environment: dict, url: str, cache: Path, before=lambda: None) -> bytes:
    adopt(environment)
    http_files.TRIES = 2
    before()
    return content_of(url, cache)


def test_ranks_download_each_file_once(hub, tmp_path):
    content = os.urandom(MB)
    url, before = serve(hub, "a.jsonl", content), len(hub.requests)

    def on_ranks() -> list[bytes]:
        return kit.spawn(3, fetch_in_process, hub.environment(), url, tmp_path / "cache", out=tmp_path / "out")

    assert on_ranks() == [content] * 3
    assert on_ranks() == [content] * 3  # the next start only looks up
    assert gets(hub, "a.jsonl", before) == [200]
    hub.stop()
    try:
        assert on_ranks() == [content] * 3
        printed = "".join((tmp_path / "out" / f"rank{rank}.txt").read_text() for rank in range(3))
        assert printed.count(f"warning: train_file: {url}: not available") == 1
    finally:
        hub.start()


def test_mutant_where_every_rank_asks_is_caught(hub, tmp_path):
    def every_rank_asks():
        http_files.fetch_once = lambda key, fetch, root, what: fetch()

    url, before = serve(hub, "multiplied.jsonl", b"rows"), len(hub.requests)
    kit.spawn(3, fetch_in_process, hub.environment(), url, tmp_path / "cache", every_rank_asks, out=tmp_path / "out")
    assert sum(r.method == "HEAD" for r in hub.requests[before:]) > 2  # one process: before and after the download
