"""Data and models of the Hub: asked for and fetched once, the commit remembered, streams in parts, the result pushed."""

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from src.checkpointing import hub_upload
from src.data import sources
from src.download import http_files
from src.download import hub as hub_module
from src.storage import launch_peers
from tests.helpers import kit
from tests.helpers.fake_hub import Fault, Hub, adopt

SHAPE = {name: value for name, value in kit.LLAMA.items() if name != "model_type"}
TEXTS = [f"def f{n}: return self" for n in range(24)]


def put_data(hub, first: int = 0, name: str = "ds") -> None:
    folder = hub.folder / "datasets/org" / name
    folder.mkdir(parents=True, exist_ok=True)
    kit.write_jsonl(folder / "train.jsonl", [{"text": text} for text in TEXTS[first : first + 16]])
    kit.write_jsonl(folder / "validation.jsonl", [{"text": text} for text in TEXTS[-4:]])


def put_model(hub, seed: int) -> dict:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.save_pretrained(hub.folder / "models/org/model")
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A Hub with a model and a data set of two commits each."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "files").mkdir()
    kit.write_yaml(folder / "gpt2.yaml", kit.TINY)
    with Hub(folder, private={"org/secret"}) as hub:
        for name in ("model", "tokenizer"):
            kit.tiny_tokenizer(folder / "models/org" / name, TEXTS)
        old = SimpleNamespace(weights=put_model(hub, 0), model=hub.commit("models/org/model"))
        new = SimpleNamespace(weights=put_model(hub, 1), model=hub.commit("models/org/model"))
        put_data(hub)
        old.data = hub.commit("datasets/org/ds")
        put_data(hub, 8)
        new.data = hub.commit("datasets/org/ds")
        put_data(hub, name="secret")
        yield hub, old, new


@pytest.fixture
def hub(served):
    yield served[0]
    served[0].faults.clear()


def recipe(folder, run="run", **fields) -> list[str]:
    """One step that changes no weight, on all rows."""
    defaults = {"model_name_or_path": "org/model", "dataset_name": "org/ds", "output_dir": folder / run}
    defaults |= {"max_steps": 1, "learning_rate": 0, "global_batch_size": 16, "cache_dir": folder / "cache"}
    return kit.flags(**{name: value for name, value in (defaults | fields).items() if value is not None})


def _train(environment, argv, folder, before):
    adopt(environment)
    launch_peers.STARTED = time.time()  # as in a new process
    before()
    kit._command("train.py", argv, folder)


def train(environment, folder, argv, world: int = 1, before=lambda: None, timeout: float = 40, **more):
    """Run train.py; return exit codes and outputs by rank, and the seconds that it took."""
    began = time.monotonic()
    try:
        kit.spawn(world, _train, environment | more, argv, folder, before, out=folder / "out", timeout=timeout)
        codes, texts = [0] * world, [(folder / "out" / f"rank{rank}.txt").read_text() for rank in range(world)]
    except kit.RankFailed as failed:
        codes, texts = failed.codes, failed.texts
    return SimpleNamespace(codes=codes, texts=texts, text="".join(texts), seconds=time.monotonic() - began)


def told(run) -> dict:
    return json.loads((Path(run) / "environment.json").read_text())["fetched"]


def commits(run) -> dict:
    """Return the commits in environment.json, by the first word of what was fetched."""
    return {name.split()[0]: found["commit"] for name, found in told(run).items()}


def since(hub, before: int, words: str, method: str = "") -> list:
    return [r for r in hub.requests[before:] if words in r.path and r.method.startswith(method)]


def refused(ended, *words: str, seconds: float = 20) -> None:
    assert set(ended.codes) == {2}, ended.text
    assert all(word in ended.text for word in words), ended.text
    assert ended.seconds < seconds
    assert "Traceback" not in ended.text


# ---- once ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(served, tmp_path_factory):
    """A run of three ranks on the newest commits, and its cache."""
    hub, _, _ = served
    folder = tmp_path_factory.mktemp("trained")
    environment, before = hub.environment(folder), len(hub.requests)
    ended = train(environment, folder, recipe(folder), world=3)
    assert ended.codes == [0] * 3, ended.text
    return SimpleNamespace(folder=folder, environment=environment, requests=hub.requests[before:], ended=ended)


def test_three_ranks_ask_and_fetch_once(served, trained, tmp_path):
    hub, _, new = served
    gets = [r.path for r in trained.requests if r.method == "GET" and "/resolve/" in r.path]
    assert len(gets) == len(set(gets))
    assert {path.rpartition("/")[2] for path in gets} >= {"model.safetensors", "tokenizer.json", "train.jsonl"}
    assert commits(trained.folder / "run") == {"model": new.model, "dataset": new.data}
    assert kit.same(kit.Run(trained.folder / "run").weights, new.weights)

    api = {3: sum("/api/" in r.path for r in trained.requests)}
    for name, world, before in (("one", 1, lambda: None), ("mutant", 3, _every_rank_asks)):
        began, folder = len(hub.requests), tmp_path / name
        ended = train(hub.environment(folder), folder, recipe(folder), world, before)
        assert ended.codes == [0] * world, ended.text
        api[name] = len(since(hub, began, "/api/"))
    assert api[3] <= api["one"] < api["mutant"], api


def _every_rank_asks():
    def ask(key, root, work, find, what):
        http_files.fetched[key] = found = find()
        return found

    hub_module.ask_once = ask


def test_one_process_asks_once(hub, tmp_path):
    """Weights are of the commit that the tokenizer and the plan are of, though main moves between."""
    before = len(hub.requests)
    assert train(hub.environment(tmp_path), tmp_path, recipe(tmp_path)).codes == [0]
    assert len(since(hub, before, "/api/models/org/model/revision/main")) == 1


def test_older_commits_and_a_main_that_moves(served, trained, tmp_path):
    hub, old, new = served
    losses = {"newest": kit.Run(trained.folder / "run").losses()}
    for name, revisions in (
        ("old", {"model_revision": old.model, "dataset_revision": old.data}),
        ("old data", {"dataset_revision": old.data}),
    ):
        argv = recipe(trained.folder, output_dir=tmp_path / name, **revisions)
        ended = train(trained.environment, tmp_path, argv, world=2)
        assert ended.codes == [0] * 2, ended.text
        losses[name] = kit.Run(tmp_path / name).losses()
    assert commits(tmp_path / "old") == {"model": old.model, "dataset": old.data}
    assert commits(tmp_path / "old data") == {"model": new.model, "dataset": old.data}
    assert kit.same(kit.Run(tmp_path / "old").weights, old.weights)

    put_data(hub, 4)
    try:
        moved = hub.sha(hub.folder / "datasets/org/ds")
        argv = recipe(tmp_path, "moved")
        assert train(trained.environment, tmp_path, argv).codes == [0]
        assert commits(tmp_path / "moved") == {"model": new.model, "dataset": moved}
        losses["moved"] = kit.Run(tmp_path / "moved").losses()
    finally:
        put_data(hub, 8)
    assert len(set(map(str, losses.values()))) == 4, losses  # each is of other rows or weights
    assert hub.sha(hub.folder / "datasets/org/ds") == new.data


def test_a_tokenizer_of_another_repository(served, tmp_path):
    """The revision of the model says nothing of it."""
    hub, old, _ = served
    argv = recipe(tmp_path, model_revision=old.model, tokenizer_name="org/tokenizer")
    ended = train(hub.environment(tmp_path), tmp_path, argv, world=2)
    assert ended.codes == [0] * 2, ended.text


# ---- without an answer -----------------------------------------------------------------------------------------------


def test_training_again_without_a_network(served, trained, tmp_path):
    hub, _, new = served
    hub.stop()
    try:
        for name, more in (("offline", {"HF_HUB_OFFLINE": "1"}), ("down", {})):
            argv = recipe(trained.folder, output_dir=tmp_path / name)
            ended = train(trained.environment, tmp_path, argv, world=2, **more)
            assert ended.codes == [0] * 2, ended.text
            assert commits(tmp_path / name) == {"model": new.model, "dataset": new.data}
            assert ended.text.count("warning: the Hub does not answer for org/ds") == (name == "down"), ended.text
            assert ended.text.count("warning: the Hub does not answer for org/model") == (name == "down"), ended.text
            assert ended.seconds < 30
        ended = train(hub.environment(tmp_path), tmp_path, recipe(tmp_path), world=2, HF_HUB_OFFLINE="1")
        refused(ended, "model_name_or_path: org/model")
    finally:
        hub.start()


def test_a_silent_hub_is_given_up_and_what_was_fetched_is_used(hub, trained, tmp_path, monkeypatch):
    hub.faults["*/org/*"] = Fault(silent=True)
    argv = recipe(trained.folder, output_dir=tmp_path / "run")
    ended = train(trained.environment, tmp_path, argv, world=2, before=_impatient)
    assert ended.codes == [0] * 2, ended.text
    ended = train(hub.environment(tmp_path), tmp_path, recipe(tmp_path), world=2, before=_impatient)
    refused(ended, "model_name_or_path: org/model", seconds=30)


def _impatient():
    """Wait for a second where half a minute is allowed."""
    from huggingface_hub import HfApi

    hub_upload.SILENCE = 1
    for name in ("model_info", "dataset_info"):
        plain = getattr(HfApi, name)
        setattr(HfApi, name, lambda *args, plain=plain, **more: plain(*args, **more | {"timeout": 1}))


def test_repositories_that_are_private_or_missing(hub, tmp_path):
    environment = hub.environment(tmp_path)
    ended = train(environment, tmp_path, recipe(tmp_path, dataset_name="org/secret"), world=2)
    refused(ended, "dataset_name: org/secret", "401", "HF_TOKEN")
    ended = train(environment, tmp_path, recipe(tmp_path, dataset_name="org/missing"))
    refused(ended, "dataset_name: org/missing", "no such folder here, and the Hub did not provide it")
    ended = train(environment, tmp_path, recipe(tmp_path, model_name_or_path="org/missing"))
    refused(ended, "model_name_or_path: org/missing")
    argv = recipe(tmp_path, dataset_revision="v9")
    refused(train(environment, tmp_path, argv), "dataset_name: org/ds", "v9")
    argv = recipe(tmp_path, "secret", dataset_name="org/secret")
    ended = train(environment, tmp_path, argv, world=2, HF_TOKEN=hub.token)
    assert ended.codes == [0] * 2, ended.text


# ---- streams ---------------------------------------------------------------------------------------------------------


def put_table(path: Path, groups: int = 2, rows: int = 512, note: int = 40_000) -> int:
    """Write a Parquet file whose column `note`, which nobody needs, is nearly all of it; return its size."""
    generator = np.random.default_rng(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pyarrow.schema({"input_ids": pyarrow.list_(pyarrow.int64()), "note": pyarrow.binary()})
    with pyarrow.parquet.ParquetWriter(path, schema, compression="none") as file:
        for _ in range(groups):
            ids = generator.integers(0, 50, (rows, 5)).tolist()
            columns = [pyarrow.array(ids), pyarrow.array([generator.bytes(note) for _ in range(rows)])]
            file.write_table(pyarrow.table(columns, schema=schema))
    return path.stat().st_size


def stream(hub, folder, steps: int = 2, **fields) -> list[str]:
    fields = {"streaming": True, "max_steps": steps, "global_batch_size": 8, "dataset_name": None} | fields
    if fields["dataset_name"] is None or "model_config" in fields:
        fields |= {"model_name_or_path": None, "model_config": hub.folder / "gpt2.yaml"}
    return recipe(folder, **fields)


@pytest.mark.parametrize("where", ["http", "hub"])
def test_of_a_parquet_stream_only_needed_columns_travel(hub, tmp_path, monkeypatch, where):
    if where == "http":
        size = put_table(hub.folder / "files/table.parquet")
        fields, name = {"train_file": f"{hub.files_url}/table.parquet"}, "/files/table.parquet"
    else:
        size = put_table(hub.folder / "datasets/org/table/train.parquet")
        fields, name = {"dataset_name": "org/table", "model_config": None}, "*/org/table/resolve/*.parquet"
    sent = []
    for before in (lambda: None, _all_columns):
        began = hub.sent(name)
        ended = train(hub.environment(tmp_path), tmp_path, stream(hub, tmp_path, resume="never", **fields), 1, before)
        assert ended.codes == [0], ended.text
        sent.append(hub.sent(name) - began)
    shutil.rmtree(hub.folder / "datasets/org/table", ignore_errors=True)
    assert 2 * sent[0] < sent[1], (sent, size)
    assert sent[0] < size


def _all_columns():
    plain = sources.Source.stream
    sources.Source.stream = lambda self, run, file=None, columns=None: plain(self, run, file)


def test_a_stream_of_lines_over_http_begins_before_the_file_is_here(hub, tmp_path):
    rows = [{"input_ids": [n // 50 % 50, n % 50, 3], "note": "x" * 4000} for n in range(10_000)]
    size = kit.write_jsonl(hub.folder / "files/lines.jsonl", rows).stat().st_size
    ended = train(hub.environment(tmp_path), tmp_path, stream(hub, tmp_path, train_file=f"{hub.files_url}/lines.jsonl"))
    assert ended.codes == [0], ended.text
    assert max(r.sent for r in hub.requests if r.matches("/files/lines.jsonl")) < size / 2
    assert any(r.status == 206 for r in hub.requests if r.matches("/files/lines.jsonl"))
    assert hub.downloads("/files/lines.jsonl") == 0


def test_a_stream_from_a_server_that_fails_ends_all_ranks_with_the_url(hub, tmp_path):
    kit.write_jsonl(hub.folder / "files/broken.jsonl", [{"input_ids": [1, 2, 3]}] * 20)
    hub.faults["/files/broken.jsonl"] = Fault(status=500)
    argv = stream(hub, tmp_path, train_file=f"{hub.files_url}/broken.jsonl")
    refused(train(hub.environment(tmp_path), tmp_path, argv, world=2), f"{hub.files_url}/broken.jsonl", seconds=30)


def test_a_stream_of_the_hub_leaves_its_files_there(hub, tmp_path):
    """Rows of the training data come in parts, and those of the validation data without it."""
    before = len(hub.requests)
    ended = train(hub.environment(tmp_path), tmp_path, stream(hub, tmp_path, dataset_name="org/ds"), world=2)
    assert ended.codes == [0] * 2, ended.text
    assert kit.Run(tmp_path / "run").kind("eval")[-1]["examples"] == 4
    asked = since(hub, before, "/datasets/org/ds/resolve/", "GET")
    assert {r.status for r in asked} == {206}
    assert not list(tmp_path.rglob("train.jsonl"))


def test_the_validation_split_of_a_stream_does_not_touch_training_files(hub, tmp_path):
    before = len(hub.requests)
    ended = train(hub.environment(tmp_path), tmp_path, ["--streaming", "true", *recipe(tmp_path)], 1, _no_training_rows)
    assert "as far as the validation data" in ended.text, ended.text
    assert since(hub, before, "validation.jsonl", "GET")
    assert not since(hub, before, "train.jsonl")


def _no_training_rows():
    from src.data import dataset
    from src.data import streaming as stream

    class Empty:
        def __init__(self, *_):
            self.stats = {}

    def end(run, splits):
        assert len(splits["validation"]) == 4
        raise http_files.UsageError("as far as the validation data")

    stream.Stream, dataset._check_budget = Empty, end


# ---- pushed ----------------------------------------------------------------------------------------------------------


def test_the_final_model_is_pushed_and_read_back(hub, tmp_path):
    environment, fields = hub.environment(tmp_path), {"push_to_hub": True, "hub_model_id": "org/pushed"}
    before = len(hub.requests)
    refused(train(environment, tmp_path, recipe(tmp_path, **fields), 2), "push_to_hub is true, but there is no token")
    assert hub.requests[before:] == []  # before anything was fetched

    ended = train(environment, tmp_path, recipe(tmp_path, **fields), 2, HF_TOKEN=hub.token)
    assert ended.codes == [0] * 2, ended.text
    final, pushed = tmp_path / "run/final", hub.folder / "models/org/pushed"
    for file in (path for path in final.rglob("*") if path.is_file()):
        assert (pushed / file.relative_to(final)).read_bytes() == file.read_bytes()
    assert "org/pushed" in hub.private
    assert f"pushed to {hub.url}/org/pushed" in ended.text
    argv = recipe(tmp_path, "again", model_name_or_path="org/pushed")
    again = train(environment, tmp_path, argv, HF_TOKEN=hub.token)
    assert again.codes == [0], again.text
    assert kit.same(kit.Run(tmp_path / "again").weights, kit.Run(tmp_path / "run").weights)


@pytest.mark.parametrize("path", ["/api/repos/create", "/api/models/org/failing/commit/*"])
@pytest.mark.parametrize("fault", [Fault(status=403), Fault(silent=True)])
def test_a_push_that_fails_is_a_warning(hub, tmp_path, path, fault):
    hub.faults[path] = fault
    argv = recipe(tmp_path, push_to_hub=True, hub_model_id="org/failing")
    ended = train(hub.environment(tmp_path), tmp_path, argv, HF_TOKEN=hub.token, timeout=15, before=_impatient)
    assert ended.codes == [0], ended.text
    final = tmp_path / "run/final"
    assert "warning: push_to_hub failed" in ended.text
    assert f"hf upload org/failing {final}" in ended.text
    assert (final / "model.safetensors").exists()
