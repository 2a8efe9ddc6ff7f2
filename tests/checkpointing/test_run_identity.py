"""What defines a run besides its fields, and which run a folder holds: no two runs are mixed, none goes on as another."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import train
from src.checkpointing import checkpoint_list, resume, run_identity
from src.config import parsing
from src.config.errors import UsageError
from src.runtime import run_status
from src.tasks import OPTIONS
from tests.helpers import kit


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("tiny")
    fields = kit.tiny_files(folder)
    values = dict(kit.TINY)
    torch.manual_seed(0)  # which evaluation is the best depends on the weights
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    model.save_pretrained(folder / "model")
    del fields["model_config"]
    return fields | {"model_name_or_path": folder / "model"}


def recipe(tiny, **fields) -> list[str]:
    values = {"global_batch_size": 8, "per_device_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1}
    values |= {"max_steps": 6, "save_steps": 2, "eval_steps": 3, "save_total_limit": 9, "lr_scheduler_type": "constant"}
    return kit.flags(**{name: value for name, value in (tiny | values | fields).items() if value is not None})


@pytest.fixture(scope="module")
def done(tiny, tmp_path_factory) -> kit.Run:
    return kit.run_training(1, tmp_path_factory.mktemp("done") / "run", *recipe(tiny))


def find(folder: Path, argv: list[str], also=None, **fields) -> resume.ResumePoint:
    """Return what the main process would resume from."""
    run, options = parsing.parse([*argv, "--output_dir", str(folder), *kit.flags(**fields)], OPTIONS)
    names = dict(zip([word[2:] for word in argv[::2]], argv[1::2], strict=True))
    splits = kit.open_data(**names)[1]
    known = {"validation": splits["validation"].stats, "mixed_precision": "no"} | (also or {})
    values = yaml.safe_load(parsing.to_yaml(run, options))
    return resume.find(run, splits["train"].stats, values, type(options), known)


# ---- contents that a folder or the launch decides -----------------------------------------------------------------------


def test_same_run_has_nothing_to_remark(tiny, done):
    assert find(done.folder, recipe(tiny)) == (done.folder / "checkpoints" / "step_00000006", [])


def test_changed_config_of_a_pretrained_model_is_refused(tiny, done, tmp_path, monkeypatch):
    path = Path(tiny["model_name_or_path"], "config.json")
    before = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(before) | {"attn_pdrop": 0.9, "transformers_version": "99.0"}))
        with pytest.raises(UsageError, match=r"attn_pdrop: 0.2 → 0.9") as refused:
            find(done.folder, recipe(tiny))
        assert "transformers_version" not in str(refused.value)
    finally:
        path.write_text(before)


def test_changed_code_of_a_model_that_runs_it_is_refused(tiny, done):
    path = Path(tiny["model_name_or_path"], "modeling.py")
    path.write_text("x = 1")
    try:
        assert find(done.folder, recipe(tiny)).folder  # nothing runs it
        with pytest.raises(UsageError, match=r"modeling.py: None → "):
            find(done.folder, recipe(tiny, trust_remote_code=True))
    finally:
        path.unlink()


def test_changed_validation_data_is_refused(tiny, done, tmp_path):
    rows = Path(tiny["validation_file"]).read_text().splitlines(keepends=True)
    other = tmp_path / "validation.jsonl"
    other.write_text("".join(rows[1:]))
    with pytest.raises(UsageError, match=r"validation data: 21 rows → 20"):
        find(done.folder, recipe(tiny, validation_file=other))
    other.write_text("".join(rows))  # moved, with the same contents
    [remark] = find(done.folder, recipe(tiny, validation_file=other)).notes
    assert "validation_file" in remark
    [remark] = find(done.folder, recipe(tiny), also={"validation": None}).notes
    assert "validation data: 21 rows → none" in remark


def test_another_precision_is_refused_on_resume(tiny, done, tmp_path):
    with pytest.raises(UsageError, match=r"mixed_precision: no → bf16") as refused:
        find(done.folder, recipe(tiny), also={"mixed_precision": "bf16"})
    assert "--init_from" in str(refused.value)
    assert "mixed_precision no in the accelerate file" in str(refused.value)
    codes, texts = kit.run_command(
        "train.py",
        *recipe(tiny, output_dir=done.folder),
        folder=made(tmp_path / "here"),
        world=2,
        env={"ACCELERATE_MIXED_PRECISION": "bf16"},
    )
    assert codes == [2, 2], texts
    assert "mixed_precision: no → bf16" in texts[0]


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize("what", ["", "/final", "/checkpoints/step_00000006"])
def test_evaluation_in_another_precision_warns(tiny, done, tmp_path, what):
    if what == "":  # a whole evaluation
        argv = ["--checkpoint", done.folder, "--output_dir", tmp_path / "out"]
        env = {"ACCELERATE_MIXED_PRECISION": "bf16"}
        codes, texts = kit.run_command("eval.py", *argv, folder=made(tmp_path / "here"), env=env)
        assert codes == [0], texts
        assert "trained with mixed_precision no and is evaluated with bf16" in texts[0]
        return

    class Bf16:
        mixed_precision = "bf16"

    warned = []
    run = parsing.RunConfig(model_name_or_path=str(done.folder) + what)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_identity, "warn", warned.append)
        run_identity.warn_of_precision(run, Bf16)
        Bf16.mixed_precision = "no"
        run_identity.warn_of_precision(run, Bf16)
    assert len(warned) == 1


def test_a_moved_model_folder_is_the_same_model(tiny, done, tmp_path):
    moved = shutil.copytree(tiny["model_name_or_path"], tmp_path / "elsewhere")
    [remark] = find(done.folder, recipe(tiny, model_name_or_path=moved)).notes
    assert str(moved) in remark
    values = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(values | {"attn_pdrop": 0.9}))
    with pytest.raises(UsageError, match=r"attn_pdrop: 0.2 → 0.9"):
        find(done.folder, recipe(tiny, model_name_or_path=moved))


def test_another_number_of_processes_is_remarked(tiny, done):
    assert find(done.folder, recipe(tiny), also={"processes": 1}).notes == []
    [remark] = find(done.folder, recipe(tiny), also={"processes": 3}).notes
    assert "processes: 1 → 3" in remark
    hook, remark = find(done.folder, recipe(tiny, ddp_comm_hook="fp16"), also={"processes": 3}).notes
    assert "ddp_comm_hook" in hook
    assert "with ddp_comm_hook the numbers depend on it" in remark


def test_changed_labels_and_tokenizer_files_are_said(tmp_path):
    data = {"examples": 1, "rows": "", "files": {}, "tokenizer": "", "labels": ["a", "b"], "tokenizer_files": "x"}
    old, new = ({"data": data | more, "model": {"a": 1}} for more in ({}, {"tokenizer_files": "y"}))
    assert run_identity.differences(old, old) == ([], [])
    faults, [remark] = run_identity.differences(old, new)
    assert not faults
    assert "tokenizer" in remark
    [fault], _ = run_identity.differences(old, {"data": data | {"labels": ["b", "a"]}, "model": {"a": 1}})
    assert "labels: a, b → b, a" in fault
    faults, [remark] = run_identity.differences(
        old | {"validation": None}, old | {"validation": {"examples": 7, "rows": ""}}
    )
    assert "none → 7 rows" in remark


def test_labels_and_tokenizer_of_a_task_are_recorded(tmp_path):
    texts = [f"number {i}" for i in range(20)]
    tokenizer = kit.tiny_tokenizer(tmp_path / "tokenizer", texts)
    rows = [{"text": text, "label": "ab"[i % 2]} for i, text in enumerate(texts)]
    fields = {"task": "text_classification", "tokenizer_name": tokenizer, "output_dir": tmp_path / "run"}
    fields |= {"model_config": kit.write_yaml(tmp_path / "m.yaml", kit.GPT2)}
    fields["train_file"] = kit.write_jsonl(tmp_path / "train.jsonl", rows)
    known = kit.open_data(**fields)[1]["train"].stats
    assert known["labels"] == ["a", "b"]
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "<|endoftext|>"}))
    changed = kit.open_data(**fields)[1]["train"].stats
    assert changed["rows"] == known["rows"]
    assert changed["tokenizer_files"] != known["tokenizer_files"]


@pytest.mark.parametrize("size", [1, 400])
def test_changed_rows_of_a_stream_are_refused(tiny, tmp_path, size):
    """Of a file of the same size; of a large one, some places are looked at."""
    path = tmp_path / "train.jsonl"
    text = Path(tiny["train_file"]).read_text() * size
    stats = []
    for i in (0, 0, 1):
        path.write_text(text[:-5] + text[-5:].replace(text[-4], str((int(text[-4]) + i) % 10)))
        flags = {"train_file": path, "model_config": None, "streaming": True, "max_steps": 3, "output_dir": tmp_path}
        fields = {name: value for name, value in (tiny | flags).items() if value is not None}
        stats.append(kit.open_data(**fields)[1]["train"].stats)
    assert (size > 1) == (len(text) > 1 << 20)
    known = [{"data": run_identity._contents(one), "model": None} for one in stats]
    assert run_identity.differences(*known[:2]) == ([], [])
    [fault], _ = run_identity.differences(known[1], known[2])
    assert "training data" in fault
    assert "other contents" in fault


@pytest.mark.parametrize("commits, says", [(("a", "a"), False), (("a", "b"), True), ((None, None), False)])
def test_another_commit_with_the_same_configuration_is_remarked(commits, says):
    data = {"examples": 1, "rows": "", "files": {}, "tokenizer": ""}
    old, new = ({"data": data, "model": {"a": 1}, "model_commit": commit} for commit in commits)
    faults, remarks = run_identity.differences(old, new)
    assert not faults
    assert bool(remarks) == says


def test_checkpoint_of_an_older_version_is_accepted_with_a_remark(tiny, done):
    data = json.loads((done.folder / "checkpoints/step_00000006/state.json").read_text())["identity"]["data"]
    new = {"data": data, "model": {"a": 1}, "model_commit": None, "validation": data, "mixed_precision": "no"}
    faults, [remark] = run_identity.differences({"data": data, "model": None}, new)
    assert not faults
    for name in ("validation", "mixed_precision", "model configuration"):
        assert name in remark


# ---- one run in one folder ----------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("left", ["everything", "metrics.jsonl"])
def test_resume_into_the_folder_of_another_run_is_refused(tiny, done, tmp_path, left):
    other = shutil.copytree(done.folder, tmp_path / "other")
    for path in other.glob("checkpoints/*/state.json"):
        state = json.loads(path.read_text())
        path.write_text(json.dumps(state | {"lineage": {"run_id": "another", "began_from": None}}))
    if left != "everything":
        shutil.rmtree(other / "checkpoints")
        shutil.rmtree(other / "final")
    before, asked = contents(other), done.folder / "checkpoints" / "step_00000002"
    codes, texts = kit.run_command(
        "train.py", *recipe(tiny, resume=asked, output_dir=other), folder=made(tmp_path / "here"), world=2
    )
    assert codes == [2, 2], texts
    last = texts[0].rstrip().splitlines()[-1]
    for text in ("resume", str(asked), "output_dir", str(other)):
        assert text in last
    assert {name: value for name, value in contents(other).items() if "rank_" not in name} == {
        name: value for name, value in before.items() if "rank_" not in name
    }


@pytest.mark.parametrize("at", [1, 3])
def test_a_run_that_began_from_a_checkpoint_is_resumed_by_the_same_command(tiny, done, tmp_path, monkeypatch, at):
    """Killed before and after its own first checkpoint; the source may be gone by then."""
    source = shutil.copytree(done.folder / "checkpoints" / "step_00000002", tmp_path / "good")
    link, run = tmp_path / "link", tmp_path / "run"
    link.symlink_to(source)
    flags = recipe(tiny, resume=f"{link}/", save_steps=1)
    update, count = train.optimizer_step, [0]

    def dies(*args):
        count[0] += 1
        return os._exit(9) if count[0] == at else update(*args)

    with monkeypatch.context() as patch:
        patch.setattr(train, "optimizer_step", dies)
        with pytest.raises(kit.RankFailed):
            kit.run_training(1, run, *flags)
    assert len(checkpoint_list.list_checkpoints(run)) == at // 2
    if at == 3:
        shutil.rmtree(source)
    again = kit.run_training(1, run, *flags)
    assert kit.same(again.weights, done.weights)
    assert [line["step"] for line in again.kind("train")] == [3, 4, 5, 6]
    steps = [json.loads(line)["step"] for line in kit.ledger_text(run).splitlines()]
    assert steps == [0, 3, 4, 5, 6]
    assert ("holds the run that began from" in (run.with_suffix(".out") / "rank0.txt").read_text()) == (at == 3)


def test_a_renamed_checkpoint_is_resumed_like_any_other(tiny, done, tmp_path):
    run = shutil.copytree(done.folder, tmp_path / "run")
    for step in (4, 6):
        shutil.rmtree(run / "checkpoints" / f"step_{step:08d}")
    good = (run / "checkpoints" / "step_00000002").rename(run / "checkpoints" / "good")
    assert find(run, recipe(tiny)).folder == good
    again = kit.run_training(1, run, *recipe(tiny))
    assert kit.same(again.weights, done.weights)
    assert kit.timeless(run) == kit.timeless(done.folder)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["good", "step_00000004", "step_00000006"]

    moved = good.rename(run / "best of all")  # out of the folder with the others: it is still of this run
    assert find(run, recipe(tiny), resume=moved).folder == moved
    again = kit.run_training(1, run, *recipe(tiny), "--resume", moved)
    assert kit.timeless(run) == kit.timeless(done.folder)


@pytest.mark.parametrize("how", ["link", "link/", "copy", "auto"])
def test_a_link_or_copy_that_the_user_made_stays(tiny, done, tmp_path, monkeypatch, how):
    """And a checkpoint that is resumed by a link to it is not archived as one that the run will contradict."""
    run = shutil.copytree(done.folder, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    mine = run / "checkpoints" / "mine"
    shutil.copytree(run / "checkpoints" / "step_00000004", mine) if how == "copy" else mine.symlink_to("step_00000004")
    words = ["--resume", f"{mine}/" if how == "link/" else mine] if how.startswith("link") else []
    with monkeypatch.context() as patch:
        patch.setattr(train, "optimizer_step", lambda *args: os._exit(9))
        with pytest.raises(kit.RankFailed):
            kit.run_training(1, run, *recipe(tiny), *words)
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == ["mine", "step_00000002", "step_00000004"]
    again = kit.run_training(1, run, *recipe(tiny))
    assert kit.same(again.weights, done.weights)
    assert kit.timeless(run) == kit.timeless(done.folder)


def test_a_fork_takes_the_best_checkpoint_along(tiny, tmp_path):
    fields = {"metric_for_best_model": "loss", "greater_is_better": False, "eval_steps": 2}
    first = kit.run_training(1, tmp_path / "first", *recipe(tiny, **fields))
    best = run_status.read_status(first.folder)["best_step"]
    assert best in (2, 4)
    fork = kit.run_training(
        1, tmp_path / "fork", *recipe(tiny, **fields, resume=first.folder / "checkpoints" / "step_00000004")
    )
    assert run_status.read_status(fork.folder)["best_step"] == best
    shutil.rmtree(first.folder)
    assert kit.same(fork.weights, kit.load_weights(fork.folder / "checkpoints" / f"step_{best:08d}"))
    assert kit.same(fork.weights, first.weights)


def test_a_fork_that_is_killed_early_does_not_become_the_other_run(tiny, tmp_path, monkeypatch):
    """Before its first checkpoint it holds only the best one of the run that it began from."""
    fields = {
        "metric_for_best_model": "loss",
        "greater_is_better": False,
        "eval_steps": 2,
        "save_steps": 1,
        "max_steps": 8,
    }
    words = recipe(tiny, **fields)
    first, fork = kit.run_training(1, tmp_path / "first", *words), tmp_path / "fork"
    folder, before = first.folder / "checkpoints", contents(first.folder)
    best, update = run_status.read_status(first.folder)["best_step"], train.optimizer_step
    assert best in (2, 4)
    for at, newest in ((1, best), (3, 5)):  # a save waits for the one before it
        count = iter(range(at))
        with monkeypatch.context() as patch:
            patch.setattr(
                train, "optimizer_step", lambda *args, c=count, n=at: os._exit(9) if next(c) == n - 1 else update(*args)
            )
            with pytest.raises(kit.RankFailed):
                kit.run_training(1, fork, *words, "--resume", folder / "step_00000004")
        assert checkpoint_list.step_of(checkpoint_list.list_checkpoints(fork)[-1]) == newest
    [own] = {run_identity._id(path) for path in checkpoint_list.list_checkpoints(fork)}
    assert own not in {run_identity._id(path) for path in checkpoint_list.list_checkpoints(first.folder)}
    with pytest.raises(UsageError, match=r"of another run"):
        find(fork, words, resume=folder / "step_00000005")
    again = kit.run_training(1, fork, *words, "--resume", folder / "step_00000004")
    assert kit.same(again.weights, first.weights)
    assert [line["step"] for line in again.kind("train")] == [5, 6, 7, 8]
    assert contents(first.folder) == before
