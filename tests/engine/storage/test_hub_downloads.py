"""Datasets and models of the Hub: looked up and fetched once, one commit for all ranks."""

import json
import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from engine.storage import hub as hub_module
from tests.helpers import kit
from tests.helpers.fake_hub import Fault, Hub, adopt

TEXTS = [f"def f{n}: return self" for n in range(24)]


def put_data(hub, first: int = 0, name: str = "ds") -> None:
    folder = hub.folder / "datasets/org" / name
    folder.mkdir(parents=True, exist_ok=True)
    kit.write_jsonl(folder / "train.jsonl", [{"text": text} for text in TEXTS[first : first + 16]])
    kit.write_jsonl(folder / "validation.jsonl", [{"text": text} for text in TEXTS[-4:]])


def put_model(hub, seed: int) -> dict:
    return load_file(kit.save_model(hub.folder / "models/org/model", kit.LLAMA, seed) / "model.safetensors")


@contextmanager
def make_hub(folder):
    """Yield a Hub with a model and a dataset of two commits each, and these commits: the first, the second."""
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


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with make_hub(tmp_path_factory.mktemp("served")) as made:
        yield made


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


def looked_up(requests: list) -> int:
    """Return how often the newest commit of the model was asked for."""
    return sum("/api/models/org/model/revision/main" in request.path for request in requests)


def test_ranks_ask_and_fetch_once(served, trained):
    """Each rank asks once, so weights are of the commit that the tokenizer is of, even if main moves in between."""
    _, _, new = served
    gets = [r.path for r in trained.requests if r.method == "GET" and "/resolve/" in r.path]
    assert len(gets) == len(set(gets))
    assert {path.rpartition("/")[2] for path in gets} >= {"model.safetensors", "tokenizer.json", "train.jsonl"}
    assert commits(trained.folder / "run") == {"model": new.model, "dataset": new.data}
    assert kit.same(kit.Run(trained.folder / "run").weights, new.weights)
    assert looked_up(trained.requests) == 3


def test_ranks_with_other_commits_are_refused(hub, served, tmp_path):
    """Although their rows are the same."""
    _, old, _ = served
    argv = recipe(tmp_path)

    def other_commit():
        if os.environ["RANK"] == "1":
            argv.extend(["--model_revision", old.model])

    words = f"model org/model@{old.model}: rank 1 has commit {old.model}, but rank 0 has none"
    refused(hub.environment(tmp_path), tmp_path, argv, words, world=2, before=other_commit)


def test_older_commits_and_a_main_that_moves(served, trained, tmp_path):
    hub, old, new = served
    revisions = {"model_revision": old.model, "dataset_revision": old.data}
    train(trained.environment, tmp_path, recipe(trained.folder, output_dir=tmp_path / "old", **revisions), world=2)
    assert commits(tmp_path / "old") == {"model": old.model, "dataset": old.data}
    assert kit.same(kit.Run(tmp_path / "old").weights, old.weights)
    put_data(hub, 4)
    try:
        moved = hub.sha(hub.folder / "datasets/org/ds")
        train(hub.environment(tmp_path), tmp_path, recipe(tmp_path, "moved"))  # another HF_HOME
        assert commits(tmp_path / "moved") == {"model": new.model, "dataset": moved}
    finally:
        put_data(hub, 8)
    losses = [kit.Run(run).losses() for run in (trained.folder / "run", tmp_path / "old", tmp_path / "moved")]
    assert len(set(map(str, losses))) == 3, losses  # each is of other rows or weights


# ---- without an answer -----------------------------------------------------------------------------------------------


def impatient():
    """Wait one second where half a minute is allowed."""
    hub_module.TIMEOUT = 1


@pytest.mark.parametrize("how", ["offline", "down", "silent", "busy"])
def test_training_without_an_answer(served, hub, trained, tmp_path, how):
    """With what was fetched earlier; without that it is refused, in seconds. A busy Hub answers 429."""
    _, _, new = served
    more = {"HF_HUB_OFFLINE": "1"} if how == "offline" else {}
    if how in ("silent", "busy"):
        hub.faults["*/org/*"] = Fault(silent=True) if how == "silent" else Fault(status=429)
    else:
        hub.stop()
    try:
        argv = recipe(trained.folder, output_dir=tmp_path / "run")
        text = train(trained.environment, tmp_path, argv, 2, impatient, **more)
        assert commits(tmp_path / "run") == {"model": new.model, "dataset": new.data}
        assert [text.count(f": {name}: no answer") for name in ("org/ds", "org/model")] == [how != "offline"] * 2
        empty, words = hub.environment(tmp_path), "model_name_or_path: org/model"
        refused(empty, tmp_path, recipe(tmp_path, "none"), words, world=2, before=impatient, **more)
    finally:
        if not hub.faults:
            hub.start()


def test_private_and_missing_repositories(hub, tmp_path):
    environment = hub.environment(tmp_path)
    secret = recipe(tmp_path, "secret", dataset_name="org/secret")
    refused(environment, tmp_path, secret, "dataset_name: org/secret", "401", world=2)
    refused(environment, tmp_path, recipe(tmp_path, dataset_revision="v9"), "dataset_name: org/ds", "v9")
    missing = recipe(tmp_path, model_name_or_path="org/missing")
    refused(environment, tmp_path, missing, "model_name_or_path: org/missing")
    train(environment, tmp_path, secret, HF_TOKEN=hub.token)
