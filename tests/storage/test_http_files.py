"""Files behind URLs: downloaded once by all processes of a disk, complete or absent, and again once they change."""

import os
import socket
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from src.config.errors import UsageError
from src.storage import http_files
from src.storage import hub as hub_module
from src.storage.cache_folder import SharedWork
from tests.helpers import kit
from tests.helpers.fake_hub import Fault, adopt

MB = 1 << 20


def serve(hub, name: str, content: bytes) -> str:
    """Serve a file; return its URL."""
    time.sleep(0.01)  # so that it is younger than a file of the same name
    (hub.folder / "files" / name).write_bytes(content)
    return f"{hub.files_url}/{name}"


def gets(hub, name: str, since: int = 0) -> list[tuple]:
    """Return (status, range, bytes sent) of each GET of a file."""
    found = [r for r in hub.requests[since:] if r.method == "GET" and r.matches(f"/files/{name}")]
    return [(r.status, r.range, r.sent) for r in found]


# ---- one process -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fetch(tmp_path, monkeypatch):
    """Return a function that downloads a URL as a new process would and returns the content."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(http_files, "is_offline", lambda: False)
    monkeypatch.setattr(http_files, "TRIES", 2)
    monkeypatch.setattr(hub_module, "records", {})

    def fetch(url: str, cache: Path = tmp_path / "cache") -> bytes:
        hub_module.records.clear()
        return Path(http_files.fetch_file(url, "train_file", cache, SharedWork(cache))).read_bytes()

    return fetch


def test_changed_file_is_downloaded_again(hub, fetch, monkeypatch):
    url = serve(hub, "changing", b"one")
    assert fetch(url) == fetch(url) == b"one"
    assert len(gets(hub, "changing")) == 1
    serve(hub, "changing", b"two")
    assert fetch(url) == b"two"
    serve(hub, "changing", b"new")
    monkeypatch.setattr(http_files, "_is_current", lambda *_: True)  # the mutant
    assert fetch(url) == b"two"


def test_file_without_etag_and_time_is_downloaded_each_time(hub, fetch):
    url = serve(hub, "unknown", b"one")
    hub.faults["/files/unknown"] = Fault(headers={"ETag": 'W/"weak"', "Last-Modified": ""})
    for content in (b"one", b"two"):
        serve(hub, "unknown", content)
        assert fetch(url) == content


@pytest.mark.parametrize("status", [401, 404])
def test_missing_or_private_file_is_not_retried(hub, fetch, status):
    url = serve(hub, f"refused{status}", b"")
    hub.faults[f"/files/refused{status}"] = Fault(status=status)
    with pytest.raises(UsageError, match=f"train_file: {url}: not available: the server answers {status}"):
        fetch(url)
    assert len(gets(hub, f"refused{status}")) == 1


@pytest.mark.parametrize("times", [1, None])
def test_interrupted_download_begins_again_or_is_given_up(hub, fetch, tmp_path, times):
    content, name = os.urandom(3 * MB), f"again{times}"
    url = serve(hub, name, content)
    hub.faults[f"/files/{name}"] = Fault(close_after=2 * MB, times=times)
    if times:
        assert fetch(url) == content
    else:
        with pytest.raises(UsageError, match=f"{url}: not fetched"):
            fetch(url)
        assert not list(tmp_path.rglob("fetched.json"))
    assert [(status, range) for status, range, _ in gets(hub, name)] == [(200, None)] * 2


def test_file_replaced_during_its_download(hub, fetch):
    """The first answer, a look-up, has another ETag."""
    url = serve(hub, "replaced", b"rows")
    hub.faults["/files/replaced"] = Fault(headers={"ETag": '"old"'}, times=1)
    assert fetch(url) == b"rows"
    assert [status for status, *_ in gets(hub, "replaced")] == [200, 200]


def test_web_page_is_refused(hub, fetch, tmp_path):
    url = serve(hub, "login.txt", b"\n<!DOCTYPE html><html>Sign in</html>")
    hub.faults["/files/*.txt"] = Fault(headers={"Content-Type": "text/html; charset=utf-8"})
    with pytest.raises(UsageError, match=f"train_file: {url}: .*web page"):
        fetch(url)
    assert not list(tmp_path.rglob("fetched.json"))
    assert fetch(serve(hub, "mislabeled.txt", b"rows")) == b"rows"


def test_silent_server_is_given_up(hub, fetch, monkeypatch):
    monkeypatch.setattr(http_files, "TIMEOUT", (1, 1))
    monkeypatch.setattr(http_files, "TRIES", 1)
    hub.faults["/files/silent"] = Fault(silent=True)
    with pytest.raises(UsageError, match="silent: not fetched"):
        fetch(serve(hub, "silent", b"rows"))


@contextmanager
def raw_server(answer: bytes):
    """Answer every request by these bytes, and close the connection."""

    def answer_all():
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer_all, daemon=True).start()
        yield f"http://localhost:{listener.getsockname()[1]}/raw.jsonl"


ROW = b'{"input_ids": [1, 2, 3]}\n'


def test_incomplete_answer_without_a_length_is_refused(fetch, tmp_path):
    chunk = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(ROW), ROW)
    with raw_server(chunk) as url, pytest.raises(UsageError, match="not fetched"):
        fetch(url)
    assert not list(tmp_path.rglob("fetched.json"))


def test_answer_without_the_file_is_refused(hub, fetch):
    """A server that prepares the file may answer 202 with a row that says so."""
    hub.faults["/files/preparing"] = Fault(status=202)
    with pytest.raises(UsageError, match="the server answers 202"):
        fetch(serve(hub, "preparing", ROW))


def test_answer_without_a_length_is_warned_about(fetch, capfd):
    with raw_server(b"HTTP/1.0 200 OK\r\n\r\n" + ROW) as url:
        assert fetch(url) == ROW
    assert f"warning: {url}: the server does not send the length" in capfd.readouterr().err


def test_file_of_a_store(fetch, monkeypatch):
    """`memory://` stands for s3:// and gs://."""
    import fsspec

    store = fsspec.filesystem("memory")
    for content in (b"one", b"two"):
        store.pipe("/a.jsonl", content)
        assert fetch("memory://a.jsonl") == content
    with pytest.raises(UsageError, match="train_file: memory://missing: not available"):
        fetch("memory://missing")
    monkeypatch.setattr(type(store), "get_file", lambda self, remote, local, **_: Path(local).write_bytes(b"o"))
    store.pipe("/b.jsonl", b"longer")
    with pytest.raises(UsageError, match="1 of 6 bytes"):
        fetch("memory://b.jsonl")


# ---- killed during a download ----------------------------------------------------------------------------------------


def _fetch_alone(url: str, cache: Path) -> None:
    http_files.is_offline = lambda: False
    http_files.fetch_file(url, "train_file", cache, SharedWork(cache))


def test_killed_download_is_absent(hub, fetch, tmp_path, monkeypatch):
    content = os.urandom(20 * MB)
    url = serve(hub, "killed", content)
    hub.faults["/files/killed"] = Fault(slow=MB / 10)  # 200 seconds: the kill comes before its end on any machine
    (job,) = kit.fork(1, _fetch_alone, url, tmp_path / "cache", out=tmp_path / "out")
    (part,) = kit.until(lambda: [part for part in tmp_path.rglob("part") if part.stat().st_size])
    job.kill()
    job.join()
    hub.faults.clear()
    assert part.stat().st_size < len(content)
    monkeypatch.setattr(http_files, "is_offline", lambda: True)
    with pytest.raises(UsageError, match="not fetched: HF_HUB_OFFLINE is set"):  # a part does not count
        fetch(url)
    monkeypatch.setattr(http_files, "is_offline", lambda: False)
    before = len(hub.requests)
    assert fetch(url) == content
    assert gets(hub, "killed", before) == [(200, None, len(content))]


def test_truncated_copy_is_downloaded_again(hub, fetch, tmp_path):
    url = serve(hub, "shorter", b"row 1\nrow 2\n")
    fetch(url)
    (copy,) = tmp_path.rglob("downloads/*/file")
    os.truncate(copy, 6)
    assert fetch(url) == b"row 1\nrow 2\n"


# ---- all ranks -------------------------------------------------------------------------------------------------------


def _fetch_all(environment: dict, urls: list[str], cache: Path, before) -> list[bytes] | str:
    """Return the contents of the URLs, or the message of a UsageError."""
    adopt(environment)
    http_files.TRIES = 2
    before()
    try:
        return [Path(http_files.fetch_file(url, "train_file", cache, SharedWork(cache))).read_bytes() for url in urls]
    except UsageError as error:
        return str(error)


def start(
    hub, folder, urls: list[str], world: int, cache="cache", before=lambda: None, **environment
) -> tuple[list, str]:
    """Return the results of all ranks, and what they printed."""
    environment = hub.environment(folder) | environment
    results = kit.spawn(world, _fetch_all, environment, urls, folder / cache, before, out=folder / "out")
    return results, "".join((folder / "out" / f"rank{rank}.txt").read_text() for rank in range(world))


def test_ranks_download_each_file_once(hub, tmp_path):
    contents = [os.urandom(MB), b"rows"]
    urls = [serve(hub, name, content) for name, content in zip(("a.jsonl", "b.jsonl"), contents, strict=True)]
    assert start(hub, tmp_path, urls, 3)[0] == [contents] * 3
    assert hub.downloads("/files/a.jsonl") == hub.downloads("/files/b.jsonl") == 1
    before = len(hub.requests)
    assert start(hub, tmp_path, urls, 3)[0] == [contents] * 3  # the next start only looks up
    assert [gets(hub, name, before) for name in ("a.jsonl", "b.jsonl")] == [[], []]
    hub.stop()
    try:
        offline, printed = start(hub, tmp_path, urls, 2, HF_HUB_OFFLINE="1")
        assert (offline, "warning" in printed) == ([contents] * 2, False)
        down, printed = start(hub, tmp_path, urls, 2)
        assert down == [contents] * 2
        assert printed.count(f"warning: train_file: {urls[0]}: no answer") == 1
        refused, _ = start(hub, tmp_path, urls, 2, "empty")
        assert all(error.startswith(f"train_file: {urls[0]}: not fetched") for error in refused)
    finally:
        hub.start()


def test_mutant_where_every_rank_asks_is_caught(hub, tmp_path):
    def every_rank_asks():
        http_files.fetch_once = lambda key, fetch, work, what: fetch()

    url, before = serve(hub, "multiplied.jsonl", b"rows"), len(hub.requests)
    start(hub, tmp_path, [url], 3, before=every_rank_asks)
    assert sum(r.method == "HEAD" for r in hub.requests[before:]) > 2  # one process: before and after the download
