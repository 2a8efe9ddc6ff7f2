"""Files behind URLs: downloaded once by all processes of a disk, complete or absent."""

import os
import shutil
import time
from pathlib import Path

import pytest

from engine.config.errors import UsageError
from engine.storage import http_files
from engine.storage import hub as hub_module
from tests.engine.storage.test_hub_downloads import recipe, refused, train
from tests.helpers import kit
from tests.helpers.fake_hub import Fault, adopt

MB = 1 << 20


def serve(hub, name: str, content: bytes) -> str:
    """Serve a file; return its URL."""
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


def test_file_in_the_cache_is_used_and_its_date_printed(hub, fetch, tmp_path, capfd):
    """Also if the server has another one by now; the line names what to remove to download it again."""
    url = serve(hub, "changing.jsonl", b"one")
    assert fetch(url) == b"one"
    serve(hub, "changing.jsonl", b"two")
    before = len(hub.requests)
    capfd.readouterr()
    assert fetch(url) == b"one"
    assert len(hub.requests) == before  # not even its version is looked up
    [copy] = tmp_path.rglob("downloads/*/file.jsonl")
    line = f"train_file: using changing.jsonl, downloaded {time.strftime('%Y-%m-%d')}; to download it again, remove "
    assert capfd.readouterr().out == f"{line}{copy.parent}\n"
    shutil.rmtree(copy.parent)
    assert fetch(url) == b"two"


def test_damaged_copy_is_downloaded_again(hub, fetch, tmp_path):
    url = serve(hub, "cut", b"rows")
    fetch(url)
    (copy,) = tmp_path.rglob("downloads/*/file")
    os.truncate(copy, 2)
    assert fetch(url) == b"rows"


def test_bytes_identify_a_downloaded_file(hub, fetch, tmp_path):
    """Not the URL, whose signature may change, nor the place of the cache."""
    urls = [serve(hub, name, content) for name, content in {"a": b"one", "b": b"one", "c": b"two"}.items()]
    files = [http_files.fetch_file(url, "train_file", tmp_path / f"cache{n}") for n, url in enumerate(urls)]
    one, same, other = map(http_files.content_key, files)
    assert one == same != other
    assert http_files.content_key(str(tmp_path / "local.jsonl")) is None


def test_offline_no_server_is_asked(hub, fetch, monkeypatch):
    url = serve(hub, "known", b"rows")
    fetch(url)
    monkeypatch.setattr(http_files, "is_offline", lambda: True)
    before = len(hub.requests)
    assert fetch(url) == b"rows"
    with pytest.raises(UsageError, match="new: not fetched: HF_HUB_OFFLINE is set"):
        fetch(serve(hub, "new", b"rows"))
    assert len(hub.requests) == before


@pytest.mark.parametrize("status", [404, 202])  # 202: it prepares the file, and may send a row that says so
def test_answer_without_the_file_is_refused(hub, fetch, tmp_path, status):
    url = serve(hub, "refused", b"rows")
    hub.faults["/files/refused"] = Fault(status=status)
    with pytest.raises(UsageError, match=f"train_file: {url}: not fetched: the server answers {status}"):
        fetch(url)
    assert not list(tmp_path.rglob("fetched.json"))


def test_empty_file_is_refused(hub, fetch):
    with pytest.raises(UsageError, match="/empty is empty: remove it"):
        fetch(serve(hub, "empty", b""))


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
    with pytest.raises(UsageError, match="silent: not fetched"):
        fetch(serve(hub, "silent", b"rows"))


def test_file_of_a_store(fetch):
    """`memory://` stands for s3:// and gs://."""
    import fsspec

    store = fsspec.filesystem("memory")
    store.pipe("/a.jsonl", b"rows")
    assert fetch("memory://a.jsonl") == b"rows"
    with pytest.raises(UsageError, match="train_file: memory://missing: not fetched"):
        fetch("memory://missing")


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
    assert gets(hub, "a.jsonl", before) == [200]
    hub.stop()
    try:
        assert on_ranks() == [content] * 3
        printed = "".join((tmp_path / "out" / f"rank{rank}.txt").read_text() for rank in range(3))
        assert printed.count("train_file: using a.jsonl, downloaded") == 1
    finally:
        hub.start()


def test_mutant_where_every_rank_downloads_is_caught(hub, tmp_path):
    original = http_files.fetch_file

    def in_a_cache_of_its_own():
        http_files.fetch_file = lambda url, field, root: original(url, field, root / os.environ["RANK"])

    url = serve(hub, "multiplied.jsonl", b"rows")
    arguments = (hub.environment(), url, tmp_path / "cache", in_a_cache_of_its_own)
    kit.spawn(3, fetch_in_process, *arguments, out=tmp_path / "out")
    assert gets(hub, "multiplied.jsonl") == [200] * 3


def test_run_does_not_resume_on_other_bytes(hub, tmp_path):
    """The cache is removed, and the server has other rows by now."""
    rows = [[f'{{"input_ids": [{number}, 7, 8]}}\n' for number in range(first, first + 16)] for first in (0, 1)]
    url = serve(hub, "rows.jsonl", "".join(rows[0]).encode())
    fields = {"model_name_or_path": None, "model_config": hub.folder / "gpt2.yaml", "dataset_name": None}
    flags, environment = recipe(tmp_path, train_file=url, **fields), hub.environment(tmp_path)
    train(environment, tmp_path, flags)
    serve(hub, "rows.jsonl", "".join(rows[1]).encode())
    assert "train_file: using rows.jsonl, downloaded" in train(environment, tmp_path, flags)
    shutil.rmtree(tmp_path / "cache" / "downloads")
    refused(environment, tmp_path, flags, "holds another run", "data.rows: ")
