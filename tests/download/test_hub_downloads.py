"""Datasets and models of the Hub: looked up and fetched once, one commit for all ranks, and streamed in parts."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from src.config.errors import UsageError
from src.data import stream_shards
from src.download import hub as hub_module
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
    """A Hub with a model and a dataset of two commits each."""
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
    """One step on all rows that changes no weight."""
    defaults = {"model_name_or_path": "org/model", "dataset_name": "org/ds", "output_dir": folder / run}
    defaults |= {"max_steps": 1, "learning_rate": 0, "global_batch_size": 16, "cache_dir": folder / "cache"}
    return kit.flags(**{name: value for name, value in (defaults | fields).items() if value is not None})


def _train(environment, argv, folder, before):
    adopt(environment)
    before()
    kit._command("train.py", argv, folder)


def train(environment, folder, argv, world: int = 1, before=lambda: None, **more) -> str:
    """Run train.py to its end; return its output."""
    kit.spawn(world, _train, environment | more, argv, folder, before, out=folder / "out")
    return "".join((folder / "out" / f"rank{rank}.txt").read_text() for rank in range(world))


def refused(environment, folder, argv, *words: str, world: int = 1, before=lambda: None, **more):
    """Assert that train.py ends with exit code 2 on all ranks, and prints these words."""
    with pytest.raises(kit.RankFailed) as failed:
        train(environment, folder, argv, world, before, **more)
    text = "".join(failed.value.texts)
    assert set(failed.value.codes) == {2}, text
    assert all(word in text for word in words), text
    assert "Traceback" not in text


def commits(run) -> dict:
    """Return the commits in environment.json, by the first word of what was fetched."""
    fetched = json.loads((Path(run) / "environment.json").read_text())["fetched"]
    return {name.split()[0]: record["commit"] for name, record in fetched.items()}


def since(hub, before: int, words: str, method: str = "") -> list:
    return [r for r in hub.requests[before:] if words in r.path and r.method.startswith(method)]


# ---- once ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(served, tmp_path_factory):
    """A run of three ranks on the newest commits, and its cache."""
    hub, _, _ = served
    folder = tmp_path_factory.mktemp("trained")
    environment, before = hub.environment(folder), len(hub.requests)
    train(environment, folder, recipe(folder), world=3)
    return SimpleNamespace(folder=folder, environment=environment, requests=hub.requests[before:])


def every_rank_asks():
    hub_module.fetch_once = lambda key, fetch, work, what: hub_module.records.setdefault(key, fetch())


def test_ranks_ask_and_fetch_once(served, trained, tmp_path):
    hub, _, new = served
    gets = [r.path for r in trained.requests if r.method == "GET" and "/resolve/" in r.path]
    assert len(gets) == len(set(gets))
    assert {path.rpartition("/")[2] for path in gets} >= {"model.safetensors", "tokenizer.json", "train.jsonl"}
    assert commits(trained.folder / "run") == {"model": new.model, "dataset": new.data}
    assert kit.same(kit.Run(trained.folder / "run").weights, new.weights)

    api = {3: sum("/api/" in r.path for r in trained.requests)}
    for name, world, before in (("one", 1, lambda: None), ("mutant", 3, every_rank_asks)):
        began, folder = len(hub.requests), tmp_path / name
        train(hub.environment(folder), folder, recipe(folder), world, before)
        api[name] = len(since(hub, began, "/api/"))
        if name == "one":  # the weights are of the commit that the tokenizer is of, even if main moves in between
            assert len(since(hub, began, "/api/models/org/model/revision/main")) == 1
    # Not equal, because `datasets` asks once in each process that converts a split.
    assert api[3] < 1.5 * api["one"] < api["mutant"], api


def test_older_commits_and_a_main_that_moves(served, trained, tmp_path):
    hub, old, new = served
    losses = {"newest": kit.Run(trained.folder / "run").losses()}
    revisions = {
        "old": {"model_revision": old.model, "dataset_revision": old.data},
        "old data": {"dataset_revision": old.data},
    }
    for name, fields in revisions.items():
        train(trained.environment, tmp_path, recipe(trained.folder, output_dir=tmp_path / name, **fields), world=2)
        losses[name] = kit.Run(tmp_path / name).losses()
    assert commits(tmp_path / "old") == {"model": old.model, "dataset": old.data}
    assert commits(tmp_path / "old data") == {"model": new.model, "dataset": old.data}
    assert kit.same(kit.Run(tmp_path / "old").weights, old.weights)

    put_data(hub, 4)
    try:
        moved = hub.sha(hub.folder / "datasets/org/ds")
        train(trained.environment, tmp_path, recipe(tmp_path, "moved"))
        assert commits(tmp_path / "moved") == {"model": new.model, "dataset": moved}
        losses["moved"] = kit.Run(tmp_path / "moved").losses()
    finally:
        put_data(hub, 8)
    assert len(set(map(str, losses.values()))) == 4, losses  # each is of other rows or weights


def test_tokenizer_of_another_repository(served, tmp_path):
    """The revision of the model does not apply to it."""
    hub, old, _ = served
    argv = recipe(tmp_path, model_revision=old.model, tokenizer_name="org/tokenizer")
    train(hub.environment(tmp_path), tmp_path, argv, world=2)


# ---- without an answer -----------------------------------------------------------------------------------------------


def impatient():
    """Wait one second where half a minute is allowed."""
    hub_module.TIMEOUT = 1


def test_training_without_a_network(served, trained, tmp_path):
    hub, _, new = served
    hub.stop()
    try:
        for name, more in (("offline", {"HF_HUB_OFFLINE": "1"}), ("down", {})):
            argv = recipe(trained.folder, output_dir=tmp_path / name)
            text = train(trained.environment, tmp_path, argv, world=2, **more)
            assert commits(tmp_path / name) == {"model": new.model, "dataset": new.data}
            for repository in ("org/ds", "org/model"):
                warning = f"warning: the Hub does not answer for {repository}"
                assert text.count(warning) == (name == "down"), text
        empty, words = hub.environment(tmp_path), "model_name_or_path: org/model"
        refused(empty, tmp_path, recipe(tmp_path), words, world=2, HF_HUB_OFFLINE="1")
    finally:
        hub.start()


def test_silent_hub_is_given_up(hub, trained, tmp_path):
    hub.faults["*/org/*"] = Fault(silent=True)
    train(trained.environment, tmp_path, recipe(trained.folder, output_dir=tmp_path / "run"), 2, impatient)
    empty, words = hub.environment(tmp_path), "model_name_or_path: org/model"
    refused(empty, tmp_path, recipe(tmp_path), words, world=2, before=impatient)


def test_private_and_missing_repositories(hub, tmp_path):
    environment = hub.environment(tmp_path)
    secret = recipe(tmp_path, "secret", dataset_name="org/secret")
    refused(environment, tmp_path, secret, "dataset_name: org/secret", "401", "HF_TOKEN", world=2)
    missing = recipe(tmp_path, dataset_name="org/missing")
    refused(environment, tmp_path, missing, "dataset_name: org/missing", "no such folder here")
    refused(environment, tmp_path, recipe(tmp_path, dataset_name="stdlib_cod"), "did you mean stdlib_code?")
    missing = recipe(tmp_path, model_name_or_path="org/missing")
    refused(environment, tmp_path, missing, "model_name_or_path: org/missing")
    refused(environment, tmp_path, recipe(tmp_path, dataset_revision="v9"), "dataset_name: org/ds", "v9")
    train(environment, tmp_path, secret, HF_TOKEN=hub.token)


# ---- streams ---------------------------------------------------------------------------------------------------------


def put_table(path: Path, groups: int = 2, rows: int = 512, note: int = 40_000) -> int:
    """Write a Parquet file that is nearly all `note`, a column that is not used; return its size."""
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


def read_all_columns():
    """The mutant."""
    open_file, open_dataset = stream_shards._open_file, stream_shards._open_dataset
    stream_shards._open_file = lambda source, file, columns: open_file(source, file, None)
    stream_shards._open_dataset = lambda source, columns=None: open_dataset(source)


@pytest.mark.parametrize("where", ["http", "hub"])
def test_parquet_stream_reads_needed_columns_only(hub, tmp_path, where):
    if where == "http":
        size = put_table(hub.folder / "files/table.parquet")
        fields, name = {"train_file": f"{hub.files_url}/table.parquet"}, "/files/table.parquet"
    else:
        size = put_table(hub.folder / "datasets/org/table/train.parquet")
        fields, name = {"dataset_name": "org/table", "model_config": None}, "*/org/table/resolve/*.parquet"
    sent = []
    for before in (lambda: None, read_all_columns):
        began = hub.sent(name)
        train(hub.environment(tmp_path), tmp_path, stream(hub, tmp_path, resume="never", **fields), 1, before)
        sent.append(hub.sent(name) - began)
    shutil.rmtree(hub.folder / "datasets/org/table", ignore_errors=True)
    assert 2 * sent[0] < sent[1], (sent, size)
    assert sent[0] < size


def test_stream_begins_before_the_file_is_downloaded(hub, tmp_path):
    rows = [{"input_ids": [n // 50 % 50, n % 50, 3], "note": "x" * 4000} for n in range(10_000)]
    size = kit.write_jsonl(hub.folder / "files/lines.jsonl", rows).stat().st_size
    train(hub.environment(tmp_path), tmp_path, stream(hub, tmp_path, train_file=f"{hub.files_url}/lines.jsonl"))
    requests = [r for r in hub.requests if r.matches("/files/lines.jsonl")]
    assert max(r.sent for r in requests) < size / 2
    assert any(r.status == 206 for r in requests)


def test_stream_from_a_failing_server_ends_all_ranks(hub, tmp_path):
    kit.write_jsonl(hub.folder / "files/broken.jsonl", [{"input_ids": [1, 2, 3]}] * 20)
    hub.faults["/files/broken.jsonl"] = Fault(status=500)
    url = f"{hub.files_url}/broken.jsonl"
    refused(hub.environment(tmp_path), tmp_path, stream(hub, tmp_path, train_file=url), url, world=2)


def test_stream_of_the_hub_is_not_downloaded(hub, tmp_path):
    """Training rows arrive in parts; the validation split is read whole."""
    before = len(hub.requests)
    train(hub.environment(tmp_path), tmp_path, stream(hub, tmp_path, dataset_name="org/ds"), world=2)
    assert kit.Run(tmp_path / "run").kind("eval")[-1]["examples"] == 4
    assert {r.status for r in since(hub, before, "/datasets/org/ds/resolve/", "GET")} == {206}
    assert not list(tmp_path.rglob("train.jsonl"))


def stop_before_training():
    from src.data import dataset

    class Empty:
        def __init__(self, *_):
            self.stats = {}

    def stop(cfg, splits, wanted):
        assert len(splits["validation"]) == 4
        raise UsageError("the validation data is ready")

    dataset.Stream, dataset._check = Empty, stop


def count_validation_rows():
    from src.data import dataset

    def stop(cfg, splits, wanted):
        raise UsageError(f"{len(splits['validation'])} validation rows")

    dataset._check = stop


def test_validation_split_of_a_stream_reads_no_training_file(hub, tmp_path):
    before, argv = len(hub.requests), ["--streaming", "true", *recipe(tmp_path)]
    environment, words = hub.environment(tmp_path), "the validation data is ready"
    refused(environment, tmp_path, argv, words, before=stop_before_training)
    assert since(hub, before, "validation.jsonl", "GET")
    assert not since(hub, before, "train.jsonl")


def test_a_limit_of_streamed_evaluation_rows_holds_for_this_run_only(hub, tmp_path):
    """A later run with the same cache evaluates all rows."""
    argv = ["--streaming", "true", *recipe(tmp_path)]
    for limit, count in (("2", 2), (None, 4)):
        words, more = f"{count} validation rows", ["--max_eval_examples", limit] if limit else []
        refused(hub.environment(tmp_path), tmp_path, argv + more, words, before=count_validation_rows)
