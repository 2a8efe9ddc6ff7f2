"""Files behind http: fetched once for all processes of a disk, never half, and every fault ends all of them with its URL."""

import gzip
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.request
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from src.config import parsing, validation
from src.data import dataset
from src.download import http_files
from src.runtime.exit_codes import run_main
from src.storage import launch_peers
from src.tasks import OPTIONS, make_task
from tests.helpers import kit
from tests.helpers.fake_hub import Fault, adopt

MB = 1 << 20
ROWS = 60


class Ended(NamedTuple):
    """How a start ended, by rank."""

    codes: list
    texts: list[str]
    rows: list  # what each rank read, None where it failed
    seconds: float

    def speakers(self, words: str) -> int:
        return sum(words in text for text in self.texts)


def put(hub, name: str, first: int = 0, note: int = 0) -> list[list[int]]:
    """Serve a file of ROWS rows, each with a `note` of so many bytes that nobody needs; return their ids."""
    rows = [[(first + n) // 50 % 50, (first + n) % 50, 7, 8] for n in range(ROWS)]
    file = hub.folder / "files" / name
    time.sleep(0.01)  # so that the time of a file that was there differs
    kit.write_jsonl(file, [{"input_ids": row, "note": "x" * note} for row in rows])
    return rows


def recipe(hub, cache, *names, **fields) -> list[str]:
    urls = [name if "://" in name else f"{hub.files_url}/{name}" for name in names]
    fields = {"model_config": hub.folder / "gpt2.yaml", "train_file": urls, "cache_dir": cache} | fields
    return kit.flags(**fields)


def open_rows(environment: dict, argv: list[str], before=lambda: None) -> list:
    """Open the data as train.py does, up to its exit where that fails; return the rows."""
    found = []

    def work(argv):
        run, options = parsing.parse(argv, OPTIONS)
        validation.check(run, options)
        found.append(dataset.prepare_datasets(run, make_task(run, options))["train"])

    adopt(environment)
    launch_peers.STARTED, http_files.TRIES = time.time(), 2  # as in a new process, but for its patience
    before()
    sys.argv = ["train.py", *argv]
    run_main(work)
    return [row["input_ids"].tolist() for row in found[0].rows(np.arange(len(found[0])))]


def start(hub, folder, argv, world: int = 1, before=lambda: None, out="out", **environment) -> Ended:
    """Open the data on `world` ranks."""
    began = time.monotonic()
    environment = hub.environment(folder) | environment
    try:
        rows = kit.spawn(world, open_rows, environment, argv, before, out=folder / out, timeout=25)
        codes, texts = [0] * world, [(folder / out / f"rank{r}.txt").read_text() for r in range(world)]
    except kit.RankFailed as failed:
        rows, codes, texts = [None] * world, failed.codes, failed.texts
    return Ended(codes, texts, rows, time.monotonic() - began)


@contextmanager
def down(hub):
    hub.stop()
    try:
        yield
    finally:
        hub.start()


def asked(hub, name: str, since: int = 0) -> list[tuple]:
    return [
        (r.status, r.range, r.sent) for r in hub.requests[since:] if r.method == "GET" and r.matches(f"/files/{name}")
    ]


def fails(ended: Ended, *words: str) -> None:
    """Assert that all ranks ended with exit code 2, and that one of them, and no other, says why."""
    assert set(ended.codes) == {2}, (ended.codes, ended.texts)
    assert all(ended.speakers(word) == 1 for word in words), ended.texts
    assert ended.seconds < 60
    assert "Traceback" not in "".join(ended.texts)


# ---- once, and again -------------------------------------------------------------------------------------------------


def test_three_processes_download_each_file_once_and_the_next_start_nothing(hub, tmp_path):
    expected = put(hub, "a.jsonl") + put(hub, "b.jsonl", 100)
    argv = recipe(hub, tmp_path / "cache", "a.jsonl", "b.jsonl")
    ended = start(hub, tmp_path, argv, world=3)
    assert ended.codes == [0] * 3, ended.texts
    assert ended.rows == [expected] * 3
    size = sum((hub.folder / "files" / name).stat().st_size for name in ("a.jsonl", "b.jsonl"))
    assert hub.downloads("/files/a.jsonl") == hub.downloads("/files/b.jsonl") == 1
    assert hub.sent("/files/[ab].jsonl") == size
    before = len(hub.requests)
    assert start(hub, tmp_path, argv, world=3).rows == [expected] * 3
    assert [asked(hub, name, before) for name in ("a.jsonl", "b.jsonl")] == [[(304, None, 0)]] * 2

    with down(hub):
        offline = start(hub, tmp_path, argv, world=2, HF_HUB_OFFLINE="1")
        assert (offline.rows, offline.speakers("warning")) == ([expected] * 2, 0), offline.texts
        online = start(hub, tmp_path, argv, world=2)
        assert online.rows == [expected] * 2, online.texts
        assert online.speakers(f"warning: {hub.files_url}/a.jsonl cannot be reached") == 1, online.texts
        argv[argv.index("--cache_dir") + 1] = str(tmp_path / "empty")
        fails(start(hub, tmp_path, argv, 2), f"{hub.files_url}/a.jsonl: not fetched")
        ended = start(hub, tmp_path, argv, world=2, HF_HUB_OFFLINE="1")
        fails(ended, f"train_file: {hub.files_url}/a.jsonl: not fetched yet, and HF_HUB_OFFLINE is set")


def _ask_alone(key, root, work, find, what):
    http_files.fetched[key] = found = find()
    return found


def test_mutant_every_rank_asks_is_caught(hub, tmp_path):
    put(hub, "multiplied.jsonl", note=100_000)
    argv = recipe(hub, tmp_path / "cache", "multiplied.jsonl")
    start(hub, tmp_path, argv, world=3, before=lambda: setattr(http_files, "ask_once", _ask_alone))
    assert len(asked(hub, "multiplied.jsonl")) > 1


def test_jobs_that_start_together_download_once(hub, tmp_path):
    expected = put(hub, "together.jsonl", note=50_000)
    hub.faults["/files/together.jsonl"] = Fault(slow=2 * MB)
    argv = recipe(hub, tmp_path / "cache", "together.jsonl")
    environment = hub.environment(tmp_path)
    jobs = [kit.fork(1, open_rows, environment, argv, out=tmp_path / f"{job}") for job in range(2)]
    assert [_code(job) for job in jobs] == [0, 0], [(tmp_path / f"{job}/rank0.txt").read_text() for job in range(2)]
    assert hub.downloads("/files/together.jsonl") == 1
    assert [_read(tmp_path / f"{job}") for job in range(2)] == [expected] * 2


def _code(job, timeout: float = 40):
    job[0].join(timeout)
    code = job[0].exitcode
    job[0].kill()
    return code


def _read(out):
    import torch

    return torch.load(out / "rank0.pt", weights_only=False)


def test_a_changed_file_is_fetched_anew(hub, tmp_path, monkeypatch):
    before = put(hub, "changing.jsonl")
    argv = recipe(hub, tmp_path / "cache", "changing.jsonl")
    assert start(hub, tmp_path, argv).rows == [before]
    after = put(hub, "changing.jsonl", 1)  # of the same size
    ended = start(hub, tmp_path, argv, world=2)
    assert ended.rows == [after] * 2
    assert hub.downloads("/files/changing.jsonl") == 2

    newest = put(hub, "changing.jsonl", 2)  # the mutant takes what is there
    monkeypatch.setattr(http_files, "_http", lambda url, folder, told, work: None)
    assert start(hub, tmp_path, argv).rows == [after] != [newest]


@pytest.mark.parametrize("query", ["?download=true&token=a%2Fb", "?x=1#part"])
def test_urls_with_a_query(hub, tmp_path, query):
    expected = put(hub, "query.jsonl")
    assert start(hub, tmp_path, recipe(hub, tmp_path / "cache", f"query.jsonl{query}")).rows == [expected]


@pytest.mark.parametrize("name", ["part.json", "fetched.json"])
def test_names_that_fetching_uses_itself(hub, tmp_path, name):
    expected = put(hub, name)
    argv = recipe(hub, tmp_path / "cache", name)
    for _ in range(2):
        ended = start(hub, tmp_path, argv)
        assert ended.rows == [expected], ended.texts


def test_a_name_with_an_escaped_slash_stays_in_its_folder(hub, tmp_path):
    (hub.folder / "files" / "deep").mkdir(exist_ok=True)
    expected = put(hub, "deep/escaped.jsonl")
    ended = start(hub, tmp_path, recipe(hub, tmp_path / "cache", "deep%2F..%2F..%2Ffiles%2Fdeep%2Fescaped.jsonl"))
    assert ended.rows == [expected], ended.texts
    (found,) = (tmp_path / "cache").rglob("escaped.jsonl")
    assert found.parent.parent.name == "downloads"


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_a_server_that_always_fails_ends_all_ranks_with_the_url(hub, tmp_path):
    put(hub, "good.jsonl")
    put(hub, "failing.jsonl")
    hub.faults["/files/failing.jsonl"] = Fault(status=500)
    ended = start(hub, tmp_path, recipe(hub, tmp_path / "cache", "good.jsonl", "failing.jsonl"), world=3)
    fails(ended, f"{hub.files_url}/failing.jsonl", "500")
    assert len(asked(hub, "failing.jsonl")) == 2  # tries, of one rank
    hub.faults["/files/failing.jsonl"] = Fault(status=500, times=1)  # and one that recovers is waited for
    assert start(hub, tmp_path, recipe(hub, tmp_path / "cache", "failing.jsonl")).codes == [0]


@pytest.mark.parametrize("status", [401, 404])
def test_what_is_not_there_or_not_for_us_is_asked_for_once(hub, tmp_path, status):
    put(hub, f"refused{status}.jsonl")
    hub.faults[f"/files/refused{status}.jsonl"] = Fault(status=status)
    ended = start(hub, tmp_path, recipe(hub, tmp_path / "cache", f"refused{status}.jsonl"), world=2)
    fails(ended, f"train_file: {hub.files_url}/refused{status}.jsonl: the server answers {status}")
    assert len(asked(hub, f"refused{status}.jsonl")) == 1
    assert ended.seconds < 20


def test_a_url_without_an_extension_is_refused_with_what_is_possible(hub, tmp_path):
    ended = start(hub, tmp_path, recipe(hub, tmp_path / "cache", "bare"), world=2)
    fails(ended, f"train_file: {hub.files_url}/bare: give files of one kind among .jsonl")


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_always_ends_midway_is_given_up(hub, tmp_path, reset):
    """Without ranges nothing can be gone on with: a loop of whole downloads would never end."""
    put(hub, name := f"midway{reset}.jsonl", note=50_000)
    hub.faults[f"/files/{name}"] = Fault(no_range=True, close_after=2 * MB, reset=reset)
    ended = start(hub, tmp_path, recipe(hub, tmp_path / "cache", name), world=2)
    fails(ended, f"{hub.files_url}/{name}: not fetched")
    assert len(asked(hub, name)) <= 4


def test_a_connection_that_ends_midway_goes_on_from_there(hub, tmp_path):
    expected = put(hub, "resumed.jsonl", note=100_000)
    size = (hub.folder / "files/resumed.jsonl").stat().st_size
    hub.faults["/files/resumed.jsonl"] = Fault(close_after=int(1.5 * MB), times=3)
    ended = start(hub, tmp_path, recipe(hub, tmp_path / "cache", "resumed.jsonl"), world=2)
    assert ended.rows == [expected] * 2, ended.texts
    statuses = [status for status, *_ in asked(hub, "resumed.jsonl")]
    assert statuses == [200, 206, 206, 206]
    assert hub.sent("/files/resumed.jsonl") <= size + 3 * MB // 2  # half a chunk a time is sent again


def _interrupted(hub, tmp_path, name: str) -> tuple[list[str], Path]:
    """Kill a start in mid-download; return its command line, and the part that it leaves."""
    hub.faults[f"/files/{name}"] = Fault(slow=4 * MB)
    argv = recipe(hub, tmp_path / "cache", name)
    (job,) = kit.fork(1, open_rows, hub.environment(tmp_path), argv, out=tmp_path / "killed")
    size = (hub.folder / "files" / name).stat().st_size
    (part,) = kit.until(lambda: [p for p in tmp_path.rglob("part") if 2 * MB <= p.stat().st_size < size])
    job.kill()
    job.join()
    assert 2 * MB <= part.stat().st_size < size
    hub.faults.clear()
    return argv, part


def test_a_killed_download_goes_on_from_its_part(hub, tmp_path):
    expected = put(hub, "killed.jsonl", note=100_000)
    argv, part = _interrupted(hub, tmp_path, "killed.jsonl")
    begun, before = part.stat().st_size, len(hub.requests)
    offline = start(hub, tmp_path, argv, HF_HUB_OFFLINE="1")  # a half file is none
    fails(offline, "killed.jsonl: not fetched yet")
    assert start(hub, tmp_path, argv, world=2).rows == [expected] * 2
    size = (hub.folder / "files/killed.jsonl").stat().st_size
    assert asked(hub, "killed.jsonl", before) == [(206, f"bytes={begun}-", size - begun)]


def test_a_part_that_is_whole_already_is_taken(hub, tmp_path):
    """Killed after the last byte and before the record: the server answers 416 to a range that begins at the end."""
    expected = put(hub, "whole.jsonl", note=100_000)
    argv, part = _interrupted(hub, tmp_path, "whole.jsonl")
    shutil.copy(hub.folder / "files/whole.jsonl", part)
    ended = start(hub, tmp_path, argv)
    assert ended.rows == [expected], ended.texts


def test_a_cached_file_that_lost_its_end_is_fetched_anew(hub, tmp_path):
    expected = put(hub, "cut.jsonl")
    argv = recipe(hub, tmp_path / "cache", "cut.jsonl")
    assert start(hub, tmp_path, argv).rows == [expected]
    shutil.rmtree(tmp_path / "cache" / "prepared")
    (cached,) = tmp_path.rglob("cut.jsonl")
    os.truncate(cached, cached.read_bytes().index(b"\n", 500) + 1)
    fails(start(hub, tmp_path, argv, HF_HUB_OFFLINE="1"), "cut.jsonl: not fetched yet")
    assert start(hub, tmp_path, argv).rows == [expected]


def test_a_file_that_changes_before_its_download_goes_on_is_begun_anew(hub, tmp_path):
    """Also where the server ignores If-Range; a mutant that does not look at the answer joins two versions."""
    put(hub, "moved.jsonl", note=100_000)
    argv, _ = _interrupted(hub, tmp_path, "moved.jsonl")
    for name in ("other", "third"):
        shutil.copytree(tmp_path / "cache", tmp_path / name)
    expected = put(hub, "moved.jsonl", 1, note=100_000)
    assert start(hub, tmp_path, argv).rows == [expected]
    for name, before, right in (("other", _without_if_range, True), ("third", _trusting, False)):
        argv[argv.index("--cache_dir") + 1] = str(tmp_path / name)
        ended = start(hub, tmp_path, argv, before=before)
        assert (ended.rows == [expected]) == right, ended.texts


def _without_if_range():
    import requests

    get = requests.get
    requests.get = lambda url, headers, **rest: get(url, headers=headers | {"If-Range": None}, **rest)


def _trusting():
    _without_if_range()
    http_files._unfit = lambda answer, version, begun: version.update(total=None)
    http_files._replaced = lambda *_: None


WRONG = {  # headers of a 206 that is not what was asked for
    "another place": {"Content-Range": "bytes 0-9/{size}"},
    "another length": {"Content-Range": "bytes {begun}-{last}/{more}"},
    "no range": {"Content-Range": "items 1-2/3"},
    "no total": {"Content-Range": "bytes {begun}-{last}/*"},
    "another ETag": {"ETag": '"other"'},
    "another time": {"Last-Modified": "Mon, 01 Jan 2001 00:00:00 GMT"},
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_rest_of_a_file_is_thrown_away(hub, tmp_path, kind):
    expected = put(hub, name := f"{kind.replace(' ', '_')}.jsonl", note=50_000)
    size = (hub.folder / "files" / name).stat().st_size

    def wrong(request):
        if request.range is None:
            return Fault(close_after=int(1.5 * MB)) if not asked_before() else None
        begun = int(request.range.removeprefix("bytes=").rstrip("-"))
        values = {"size": size, "begun": begun, "last": size - 1, "more": size + 1}
        return Fault(headers={key: value.format(**values) for key, value in WRONG[kind].items()})

    def asked_before():
        return [r for r in hub.requests if r.matches(f"/files/{name}") and r.range]

    hub.faults[f"/files/{name}"] = wrong
    ended = start(hub, tmp_path, recipe(hub, tmp_path / "cache", name))
    assert ended.rows == [expected], ended.texts
    assert [status for status, *_ in asked(hub, name)] == [200, 206, 200]


def test_a_file_that_is_replaced_during_its_download_is_begun_anew(hub, tmp_path):
    expected = put(hub, "replaced.jsonl", note=1000)
    hub.faults["/files/replaced.jsonl"] = lambda r: Fault(headers={"ETag": '"old"'}) if not seen(r) else None

    def seen(request):
        return [r for r in hub.requests if r.matches("/files/replaced.jsonl") and r is not request]

    assert start(hub, tmp_path, recipe(hub, tmp_path / "cache", "replaced.jsonl")).rows == [expected]
    assert [status for status, *_ in asked(hub, "replaced.jsonl")] == [200, 200]


def test_a_login_page_is_no_data(hub, tmp_path):
    (hub.folder / "files/login.txt").write_text("\n<!DOCTYPE html><html>Sign in</html>")
    hub.faults["/files/login.txt"] = Fault(headers={"Content-Type": "text/html; charset=utf-8"})
    ended = start(hub, tmp_path, recipe(hub, tmp_path / "cache", "login.txt"))
    fails(ended, f"train_file: {hub.files_url}/login.txt: the server answers with a web page")
    assert not list(tmp_path.rglob("fetched.json"))
    expected = put(hub, "mislabeled.jsonl")
    hub.faults["/files/mislabeled.jsonl"] = Fault(headers={"Content-Type": "text/html"})
    assert start(hub, tmp_path, recipe(hub, tmp_path / "cache", "mislabeled.jsonl")).rows == [expected]


@contextmanager
def raw_server(answer: bytes):
    """Answer every request by these bytes, and close the connection."""

    def serve():
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://localhost:{listener.getsockname()[1]}/raw.jsonl"


ROW = b'{"input_ids": [1, 2, 3]}\n'


def half_packed() -> bytes:
    """Return whole rows of a gzip file whose end is missing."""
    packer = zlib.compressobj(wbits=31)
    return packer.compress(ROW * 9) + packer.flush(zlib.Z_SYNC_FLUSH)


UNENDED = {  # answers that stop before their end
    "chunked": b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(ROW), ROW),
    "gzip": b"Content-Encoding: gzip\r\nContent-Length: 999\r\n\r\n" + gzip.compress(ROW * 9),
    "gzip that ends its chunks": b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
    % (len(half_packed()), half_packed()),
    "length": b"Content-Length: 999\r\n\r\n" + ROW,
}


@pytest.mark.parametrize("kind", UNENDED)
def test_an_answer_that_ends_early_is_no_file(hub, tmp_path, kind):
    with raw_server(b"HTTP/1.1 200 OK\r\n" + UNENDED[kind]) as url:
        ended = start(hub, tmp_path, recipe(hub, tmp_path / "cache", url))
    fails(ended, f"{url}: not fetched")
    assert not list(tmp_path.rglob("fetched.json"))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("status", ["202 Accepted", "204 No Content", "304 Not Modified"])
def test_an_answer_that_is_not_the_file_is_refused(hub, tmp_path, status, streaming):
    """A server that still prepares a file may answer with a row that says so."""
    body = b"Content-Length: %d\r\n\r\n%s" % (len(ROW), ROW) if status < "203" else b"\r\n"
    with raw_server(f"HTTP/1.1 {status}\r\nConnection: close\r\n".encode() + body) as url:
        fields = {"streaming": True, "max_steps": 1} if streaming else {}
        ended = start(hub, tmp_path, recipe(hub, tmp_path / "cache", url, **fields))
    fails(ended, f"the server answers {status}")


def test_an_answer_without_a_length_is_taken_with_a_warning(hub, tmp_path):
    with raw_server(b"HTTP/1.0 200 OK\r\n\r\n" + ROW) as url:
        ended = start(hub, tmp_path, recipe(hub, tmp_path / "cache", url))
    assert ended.rows == [[[1, 2, 3]]], ended.texts
    assert ended.speakers(f"warning: {url}: the server does not say how long it is") == 1


def _naive(url, folder, told, work):
    """The mutant: take what has come for the file, whatever was promised."""
    with urllib.request.urlopen(url) as answer, open(folder / "part", "wb") as target:
        shutil.copyfileobj(answer, target)
    (folder / "part").rename(folder / "truncated.jsonl")
    return {"url": url, "file": "truncated.jsonl", "bytes": 0, "etag": None, "modified": None}


def test_mutant_taking_half_a_file_for_a_whole_one_is_caught(hub, tmp_path):
    expected = put(hub, "truncated.jsonl")
    end = (hub.folder / "files/truncated.jsonl").read_bytes().index(b"\n", 500) + 1
    for before, rows in ((lambda: None, expected), (lambda: setattr(http_files, "_http", _naive), expected[:10])):
        hub.faults["/files/truncated.jsonl"] = Fault(close_after=end, times=1)
        (found,) = start(hub, tmp_path, recipe(hub, tmp_path / f"{len(rows)}", "truncated.jsonl"), before=before).rows
        assert (found == expected) == (rows == expected)


def test_a_silent_server_is_given_up(hub, tmp_path):
    put(hub, "silent.jsonl")
    hub.faults["/files/silent.jsonl"] = Fault(silent=True)
    argv = recipe(hub, tmp_path / "cache", "silent.jsonl")
    ended = start(hub, tmp_path, argv, world=2, before=lambda: setattr(http_files, "SILENCE", (1, 1)))
    fails(ended, f"{hub.files_url}/silent.jsonl: not fetched")


def test_a_server_that_compresses_unasked(hub, tmp_path):
    """As stores do with files that were uploaded so: what comes is longer than what was promised."""
    expected = put(hub, "packed.jsonl", note=100)
    file = hub.folder / "files/packed.jsonl"
    file.write_bytes(gzip.compress(file.read_bytes()))
    hub.faults["/files/packed.jsonl"] = Fault(headers={"Content-Encoding": "gzip"})
    ended = start(hub, tmp_path, recipe(hub, tmp_path / "cache", "packed.jsonl"))
    assert ended.rows == [expected], ended.texts


# ---- killed, and slow ------------------------------------------------------------------------------------------------


def _killed_while_two_wait(hub, tmp_path, name, before=lambda: None) -> tuple[list, str]:
    """Kill the rank that fetches; return the exit codes and what the others print."""
    put(hub, name, note=100_000)
    hub.faults[f"/files/{name}"] = Fault(slow=1 * MB)
    argv, out = recipe(hub, tmp_path / "cache", name), tmp_path / "three"
    ranks = kit.fork(3, open_rows, hub.environment(tmp_path), argv, before, out=out)
    kit.until(lambda: [p for p in tmp_path.rglob("part") if p.stat().st_size])
    time.sleep(1)  # the others wait by now
    owner = _owner(next(iter(tmp_path.rglob("part"))), ranks)
    hub.faults.clear()
    began = time.monotonic()
    os.kill(ranks[owner].pid, signal.SIGKILL)
    for rank in ranks:
        rank.join(30)
    assert time.monotonic() - began < 25
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    text = "".join((out / f"rank{rank}.txt").read_text() for rank in range(3))
    assert codes.pop(owner) == -signal.SIGKILL
    return codes, text.replace(f"rank {owner}", "rank OWNER")


def _owner(part: Path, ranks) -> int:
    """Return which rank has the file open."""
    for number, rank in enumerate(ranks):
        links = [Path(link) for link in Path(f"/proc/{rank.pid}/fd").iterdir()]
        if any(os.path.realpath(link) == str(part.resolve()) for link in links):
            return number
    raise AssertionError("nobody is downloading")


def test_who_waits_for_a_process_that_is_killed_says_so_and_stops(hub, tmp_path):
    codes, text = _killed_while_two_wait(hub, tmp_path, "owner.jsonl")
    assert codes == [1, 1], text
    assert "failed: rank OWNER ended without an error message while data was prepared (killed?)" in text


def test_mutant_without_a_look_at_the_others_is_caught(hub, tmp_path):
    codes, _ = _killed_while_two_wait(
        hub, tmp_path, "alone.jsonl", lambda: setattr(launch_peers.LaunchPeers, "raise_if_failed", _nothing)
    )
    assert codes != [1, 1]


def _nothing(work):
    pass


def test_another_job_takes_over_from_one_that_is_killed(hub, tmp_path):
    expected = put(hub, "inherited.jsonl", note=100_000)
    size = (hub.folder / "files/inherited.jsonl").stat().st_size
    hub.faults["/files/inherited.jsonl"] = Fault(slow=2 * MB)
    argv, environment = recipe(hub, tmp_path / "cache", "inherited.jsonl"), hub.environment(tmp_path)
    first = kit.fork(1, open_rows, environment, argv, out=tmp_path / "first")
    kit.until(lambda: [p for p in tmp_path.rglob("part") if p.stat().st_size >= MB])
    second = kit.fork(1, open_rows, environment, argv, out=tmp_path / "second")
    time.sleep(0.7)
    hub.faults.clear()
    first[0].kill()
    assert _code(second) == 0, (tmp_path / "second/rank0.txt").read_text()
    assert _read(tmp_path / "second") == expected
    assert hub.downloads("/files/inherited.jsonl") == 0  # the rest of what the first had begun
    assert hub.sent("/files/inherited.jsonl") <= size + 2 * MB


def _train(environment, argv, folder):
    adopt(environment)
    kit._command("train.py", argv, folder)


def test_a_server_slower_than_a_collective_may_wait(hub, tmp_path):
    """A whole run whose data comes later than ddp_timeout, at once and then byte by byte; environment.json tells from where."""
    put(hub, "late.jsonl", note=1000)
    size = (hub.folder / "files/late.jsonl").stat().st_size
    hub.faults["/files/late.jsonl"] = Fault(delay=4, slow=size / 4)
    argv = recipe(hub, tmp_path / "cache", "late.jsonl", ddp_timeout=5, max_steps=3, output_dir=tmp_path / "run")
    began = time.monotonic()
    kit.spawn(2, _train, hub.environment(tmp_path), argv, tmp_path, out=tmp_path / "out", timeout=60)
    assert time.monotonic() - began > 8
    assert len(kit.Run(tmp_path / "run").kind("train")) >= 1
    (told,) = json.loads((tmp_path / "run/environment.json").read_text())["fetched"].values()
    with urllib.request.urlopen(urllib.request.Request(f"{hub.files_url}/late.jsonl", method="HEAD")) as answer:
        etag = answer.headers["ETag"]
    assert {name: told[name] for name in ("url", "etag", "bytes")} == {
        "url": f"{hub.files_url}/late.jsonl",
        "etag": etag,
        "bytes": size,
    }
