"""The Hub of the tests answers the real libraries as the real one does, and fails them as it is told to."""

import http.client
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers import kit
from tests.helpers.fake_hub import Fault, Hub, adopt

# Evaluates one expression a line. HF_ENDPOINT is read when the libraries are imported, so each Hub needs a process.
CHILD = """
import json, os, sys, tempfile
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no answer
import huggingface_hub as hub, datasets
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
for line in sys.stdin:
    try:
        answer = json.dumps({"value": eval(json.loads(line))})
    except Exception as error:
        answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
    print(answer, file=answers, flush=True)
"""
ROWS = [{"text": f"row {i}", "n": i} for i in range(500)]
TINY = '[w.double().sum().item() for w in AutoModelForCausalLM.from_pretrained("org/%s").parameters()]'


class Failed(Exception):
    pass


class Child:
    """A process with the real libraries that sees one Hub only."""

    def __init__(self, environment: dict[str, str]):
        inherited = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
        proxy = {"HTTP_PROXY": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}  # nobody there
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            env=inherited | proxy | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=environment["HF_HOME"],
        )

    def __call__(self, expression: str):
        """Return the value of an expression, or raise Failed with the name and the text of its exception."""
        print(json.dumps(expression), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise Failed(answer["error"])
        return answer["value"]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A Hub with models, data sets and files, and two processes of which the second is offline."""
    folder = tmp_path_factory.mktemp("served")
    for name in ("files", "models/org/tiny", "models/org/gated", "models/org/big"):
        (folder / name).mkdir(parents=True)
    for name in ("chats", "table", "secret"):
        (folder / "datasets" / "org" / name).mkdir(parents=True)
    (folder / "files" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    shutil.copy(folder / "files" / "rows.jsonl", folder / "datasets/org/chats/train.jsonl")
    shutil.copy(folder / "files" / "rows.jsonl", folder / "datasets/org/secret/train.jsonl")
    (folder / "models/org/big/data.bin").write_bytes(os.urandom(12 << 20))
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, folder / "datasets/org/table/train-0.parquet", row_group_size=50)
    with Hub(folder, private={"org/secret"}, gated={"org/gated"}) as hub:
        environment = hub.environment(tmp_path_factory.mktemp("homes"))
        online, offline = Child(environment), Child(environment | {"HF_HUB_OFFLINE": "1"})
        model = kit.tiny_tokenizer(folder / "models/org/tiny", ["what is one plus two?"], chat_template=kit.CHATML)
        torch.manual_seed(0)
        shape = {name: value for name, value in kit.LLAMA.items() if name != "model_type"}
        LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(model)
        shutil.copy(model / "config.json", folder / "models/org/gated")
        yield hub, online, offline
        for child in (online, offline):
            child.process.kill()
            child.process.wait()


@pytest.fixture
def hub(served):
    yield served[0]
    served[0].faults.clear()


@pytest.fixture
def child(served):
    return served[1]


def ask(hub, path, method="GET", connection=None, **headers):
    connection = connection or http.client.HTTPConnection("127.0.0.1", hub.port)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    return response, response.read()


def files_asked_for(hub, since: int) -> list[str]:
    return [r.path.rpartition("/")[2] for r in hub.requests[since:] if r.method == "GET" and "/resolve/" in r.path]


# ---- plain files, without any library -------------------------------------------------------------------------------


def test_plain_files_have_etags_ranges_and_conditions(hub):
    path, content = "/files/rows.jsonl", (hub.folder / "files/rows.jsonl").read_bytes()
    connection = http.client.HTTPConnection("127.0.0.1", hub.port)  # one for all of it
    whole, body = ask(hub, path, connection=connection)
    assert (whole.status, body, whole.headers["Accept-Ranges"]) == (200, content, "bytes")
    assert hub.downloads(path) == 1
    head, nothing = ask(hub, path, "HEAD", connection)
    assert (nothing, head.headers["Content-Length"], head.headers["ETag"]) == (
        b"",
        str(len(content)),
        whole.headers["ETag"],
    )
    for asked, part in (("5-9", content[5:10]), ("0-0", content[:1]), ("-7", content[-7:]), ("9-", content[9:])):
        answer, body = ask(hub, path, connection=connection, Range=f"bytes={asked}")
        assert (answer.status, body) == (206, part)
        assert answer.headers["Content-Range"].endswith(f"/{len(content)}")
    tag, modified = whole.headers["ETag"], whole.headers["Last-Modified"]
    for validator, status in ((tag, 206), (modified, 206), ('"another"', 200)):
        assert ask(hub, path, connection=connection, Range="bytes=3-", If_Range=validator)[0].status == status
    assert ask(hub, path, connection=connection, If_None_Match=tag)[0].status == 304
    assert ask(hub, path, connection=connection, Range=f"bytes={len(content)}-")[0].status == 416
    assert ask(hub, "/files/none", connection=connection)[0].status == 404
    assert ask(hub, "/files/../../secret", connection=connection)[0].status == 400
    assert hub.downloads(path) == 2  # the parts are none, but one was refused as a part
    hub.faults[path] = Fault(no_range=True, times=1)
    assert [ask(hub, path, connection=connection, Range="bytes=3-")[0].status for _ in range(2)] == [200, 206]


def test_requests_of_many_threads_are_all_counted(hub):
    before = hub.downloads("/files/*"), hub.sent("/files/*")
    threads = [threading.Thread(target=lambda: [ask(hub, "/files/rows.jsonl") for _ in range(5)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    size = (hub.folder / "files/rows.jsonl").stat().st_size
    assert (hub.downloads("/files/*"), hub.sent("/files/*")) == (before[0] + 40, before[1] + 40 * size)


# ---- what the libraries fetch ---------------------------------------------------------------------------------------


def test_data_sets_load_and_each_file_is_downloaded_once(hub, child):
    for _ in range(2):
        assert child("load_dataset('org/chats', split='train')[:3]") == {
            "text": ["row 0", "row 1", "row 2"],
            "n": [0, 1, 2],
        }
        assert child("load_dataset('org/table', split='train')['n'][-1]") == 499
    assert hub.downloads("*/chats/resolve/*/train.jsonl") == hub.downloads("*/train-0.parquet") == 1
    assert child(f"load_dataset('json', data_files='{hub.files_url}/rows.jsonl', split='train').num_rows") == 500


def test_streams_ask_for_parts(hub, child):
    before = len(hub.requests)
    assert child("sum(row['n'] for row in load_dataset('org/table', split='train', streaming=True))") == sum(range(500))
    answers = [
        (r.range is not None, r.status) for r in hub.requests[before:] if r.method == "GET" and "parquet" in r.path
    ]
    assert answers
    assert set(answers) == {(True, 206)}


def test_models_and_tokenizers_load(hub, child):
    weights = load_file(hub.folder / "models/org/tiny/model.safetensors")
    assert sorted(child(TINY % "tiny")) == pytest.approx(sorted(w.double().sum().item() for w in weights.values()))
    assert child("AutoTokenizer.from_pretrained('org/tiny').decode([10, 11, 0])").endswith("<|endoftext|>")
    assert child("AutoTokenizer.from_pretrained('org/tiny').chat_template") == kit.CHATML
    before = len(hub.requests)
    names = child("sorted(os.listdir(hub.snapshot_download('org/tiny')))")
    assert names == sorted(path.name for path in (hub.folder / "models/org/tiny").iterdir())
    assert files_asked_for(hub, before) == []
    assert hub.downloads("/org/tiny/resolve/*/model.safetensors") == 1


def test_a_change_is_another_commit_and_what_was_committed_stays(hub, child):
    file = hub.folder / "datasets/org/moving/train.jsonl"
    file.parent.mkdir()
    kit.write_jsonl(file, ROWS[:3])
    count = "load_dataset('org/moving', split='train', revision=%r).num_rows"
    sha = hub.commit("datasets/org/moving", tag="v1")
    assert child("hub.dataset_info('org/moving').sha") == sha
    assert child(count % "main") == 3
    kit.write_jsonl(file, ROWS[:4])
    assert child("hub.dataset_info('org/moving').sha") != sha
    assert [child(count % revision) for revision in ("main", "v1", sha)] == [4, 3, 3]
    with pytest.raises(Failed, match="Revision 'v2' doesn't exist"):
        child(count % "v2")


def test_a_folder_is_pushed_and_loaded_back(hub, child):
    push = f"hub.upload_folder(repo_id='org/pushed', folder_path='{hub.folder}/models/org/tiny', token=%r).oid"
    with pytest.raises(Failed, match="401"):
        child("hub.create_repo('org/pushed').url")
    assert child(f"hub.create_repo('org/pushed', token='{hub.token}').repo_id") == "org/pushed"
    with pytest.raises(Failed, match="401"):
        child(push % None)
    first = child(push % hub.token)
    before = hub.count("POST", "/commit/")
    assert child(push % hub.token) == first
    assert hub.count("POST", "/commit/") == before  # nothing has changed
    assert child(TINY % "pushed") == child(TINY % "tiny")
    second = child(f"AutoTokenizer.from_pretrained('org/tiny').push_to_hub('org/pushed', token='{hub.token}').oid")
    assert (hub.folder / "models/org/pushed/README.md").exists()  # transformers' model card
    third = child(f"hub.delete_file('README.md', 'org/pushed', token='{hub.token}').oid")
    assert not (hub.folder / "models/org/pushed/README.md").exists()
    assert child("hub.model_info('org/pushed').sha") == third
    assert child(
        f"'README.md' in hub.list_repo_files('org/pushed', revision='{second}')"
    )  # what was pushed over is kept
    with pytest.raises(Failed, match="412"):
        child(
            f"hub.upload_file(path_or_fileobj=b'1', path_in_repo='1', repo_id='org/pushed', token='{hub.token}', "
            f"parent_commit='{'0' * 40}').oid"
        )


def test_private_and_gated_repositories_need_the_token(hub, child):
    rows = "load_dataset('org/secret', split='train', token=%r).num_rows"
    with pytest.raises(
        Failed, match=r"DatasetNotFoundError: Dataset 'org/secret' doesn't exist .* or cannot be accessed"
    ):
        child(rows % None)
    assert child(rows % hub.token) == 500
    with pytest.raises(Failed, match="GatedRepoError: 401"):
        child("hub.snapshot_download('org/gated')")
    with pytest.raises(Failed, match="Invalid credentials"):
        child("hub.snapshot_download('org/gated', token='hf_wrong')")
    with pytest.raises(Failed, match="RepositoryNotFoundError: 401"):
        child("hub.snapshot_download('org/missing')")
    with pytest.raises(Failed, match="RepositoryNotFoundError: 404"):
        child(f"hub.snapshot_download('org/missing', token='{hub.token}')")


def test_what_was_fetched_is_there_when_the_server_is_not(hub, served):
    _, child, offline = served
    wanted = [TINY % "tiny", "load_dataset('org/chats', split='train').num_rows", "hub.snapshot_download('org/tiny')"]
    there = [child(expression) for expression in wanted]
    hub.stop()
    try:
        assert [offline(expression) for expression in wanted] == there
        with pytest.raises(Failed, match="ConnectionError"):
            offline("load_dataset('org/never_seen')")
        with pytest.raises(Failed, match="ConnectError"):
            child("hub.model_info('org/tiny').sha")
    finally:
        hub.start()
    assert child("hub.model_info('org/tiny').id") == "org/tiny"


def _load(environment):
    from datasets import load_dataset
    from huggingface_hub import snapshot_download

    adopt(environment)
    return load_dataset("org/chats", split="train").num_rows, snapshot_download("org/tiny")


def test_forked_processes_adopt_it_and_share_what_they_fetch(hub, tmp_path):
    before = hub.downloads("*/chats/resolve/*/train.jsonl"), hub.downloads("*/model.safetensors")
    environment = hub.environment(tmp_path)
    results = kit.spawn(2, _load, environment, out=tmp_path / "out")
    assert results[0] == results[1]
    assert results[0][0] == 500
    assert results[0][1].startswith(environment["HF_HOME"])
    after = hub.downloads("*/chats/resolve/*/train.jsonl"), hub.downloads("*/model.safetensors")
    assert after == (before[0] + 1, before[1] + 1)


# ---- faults ---------------------------------------------------------------------------------------------------------

FETCH = "os.path.getsize(hub.hf_hub_download('org/big', 'data.bin', cache_dir=tempfile.mkdtemp(dir='.')))"
BIG = "/org/big/resolve/main/data.bin"
SIZE = 12 << 20


def gets(hub, since: int) -> list[tuple]:
    return [(r.status, r.range, r.sent) for r in hub.requests[since:] if r.method == "GET" and r.matches(BIG)]


def test_a_download_that_ends_midway_is_resumed(hub, child):
    before = len(hub.requests)
    hub.faults[BIG] = Fault(close_after=11 << 20, times=1)
    assert child(FETCH) == SIZE
    assert gets(hub, before) == [(200, None, 11 << 20), (206, f"bytes={10 << 20}-", 2 << 20)]  # chunks of 10 MiB
    hub.faults[BIG] = Fault(close_after=100, reset=True, times=1)
    with pytest.raises(Failed, match=r"ReadError: \[Errno 104\]"):
        child(FETCH)


def test_answers_that_fail_or_are_late(hub, child):
    before = len(hub.requests)
    hub.faults["*/data.bin"] = Fault(status=500, times=1)  # meets the HEAD
    assert child(FETCH) == SIZE
    hub.faults["*/data.bin"] = lambda request: Fault(status=503) if request.method == "GET" else None
    with pytest.raises(Failed, match="503"):
        child(FETCH)
    hub.faults["*/data.bin"] = Fault(status=429, headers={"Retry-After": "0"}, times=2)
    assert child(FETCH) == SIZE
    assert [r.status for r in hub.requests[before:] if r.matches(BIG)] == [500, 200, 200, 200, 503, 429, 429, 200, 200]
    for fault in (Fault(slow=SIZE), Fault(delay=0.5)):
        hub.faults[BIG], start = fault, time.monotonic()
        assert child(FETCH) == SIZE
        assert time.monotonic() - start > 0.9


def test_an_answer_that_never_comes_is_given_up_and_asked_for_again(hub, child):
    before = len(hub.requests)
    silent = Fault(silent=True, times=1)
    hub.faults[BIG] = lambda request: silent if request.method == "GET" else None
    child("setattr(hub.constants, 'HF_HUB_DOWNLOAD_TIMEOUT', 0.5)")
    try:
        assert child(FETCH) == SIZE
    finally:
        child("setattr(hub.constants, 'HF_HUB_DOWNLOAD_TIMEOUT', 5)")
    assert gets(hub, before) == [(None, None, 0), (200, None, SIZE)]


def test_the_server_ends_at_once_under_clients_that_wait_and_beside_forked_processes(tmp_path):
    with Hub(tmp_path) as hub:
        hub.faults["/files/*"] = Fault(silent=True)
        waiting, idle = (socket.create_connection(("127.0.0.1", hub.port), timeout=10) for _ in range(2))
        waiting.sendall(b"GET /files/a HTTP/1.1\r\n\r\n")
        idle.sendall(b"HEAD /b HTTP/1.1\r\n\r\n")
        assert b"404" in idle.recv(1 << 16)
        kit.until(lambda: hub.count() == 2)
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        forked.start()  # has the listening socket and both connections
        start = time.monotonic()
    try:
        assert (waiting.recv(1), idle.recv(1)) == (b"", b"")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", hub.port), timeout=10)
        assert time.monotonic() - start < 5
    finally:
        forked.kill()
        forked.join()


def test_people_can_start_it(tmp_path):
    (tmp_path / "models/org/tiny").mkdir(parents=True)
    command = [sys.executable, "-m", "tests.helpers.fake_hub", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=kit.REPOSITORY)
    lines = list(iter(process.stdout.readline, "\n"))
    printed = dict(line.strip().removeprefix("export ").split("=", 1) for line in lines)
    with socket.create_connection(("127.0.0.1", int(printed["HF_ENDPOINT"].rpartition(":")[2]))) as client:
        client.sendall(b"GET /api/models/org/tiny HTTP/1.1\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
    assert "/api/models/org/tiny" in process.stdout.readline()
    process.terminate()  # a shell that starts it in the background has it ignore Ctrl-C
    assert process.wait(10) == -signal.SIGTERM
