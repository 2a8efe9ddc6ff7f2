"""The best model: saved when it is evaluated, kept, exported to final/, and reported."""

import json
import os
import shutil

import pytest

import train
from src.checkpointing import checkpoint_list
from src.config.errors import UsageError
from src.runtime import run_status
from tests.helpers import kit

FIELDS = {"metric_for_best_model": "loss", "greater_is_better": True}  # so that the first evaluation is the best
STEPS = {"max_steps": 10, "eval_steps": 3, "save_steps": 100, "save_total_limit": 1, "logging_steps": 1}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict:
    return kit.tiny_files(tmp_path_factory.mktemp("tiny"))


def recipe(tiny, **fields) -> list[str]:
    values = {"global_batch_size": 8, "per_device_batch_size": 4, "learning_rate": 1e-2} | STEPS | FIELDS | fields
    return kit.flags(**{name: value for name, value in (tiny | values).items() if value is not None})


@pytest.fixture(scope="module")
def done(tiny, tmp_path_factory) -> kit.Run:
    return kit.run_training(2, tmp_path_factory.mktemp("done") / "run", *recipe(tiny))


@pytest.fixture
def copy(done, tmp_path):
    """A copy of that run's folder, to be changed."""
    return shutil.copytree(done.folder, tmp_path / "run")


def check_best(run: kit.Run, step: int = 3) -> dict:
    """Assert that final/ is the model of `step`, the best one, without training state; return status.json."""
    assert [checkpoint_list.step_of(path) for path in checkpoint_list.list_checkpoints(run.folder)] == [
        step,
        STEPS["max_steps"],
    ]
    best = run.folder / "checkpoints" / f"step_{step:08d}"
    assert kit.same(run.weights, kit.load_weights(best))
    assert not kit.same(run.weights, kit.load_weights(run.folder / f"checkpoints/step_{STEPS['max_steps']:08d}"))
    names = {path.name for path in (run.folder / "final").iterdir()}
    assert "config.json" in names
    assert not [name for name in names if name.startswith(("optimizer", "state"))]
    told = run_status.read_status(run.folder)
    assert told["final_step"] == step
    return told


def best_line(folder) -> dict:
    return max((line for line in kit.Run(folder).kind("eval")), key=lambda line: line["loss"])


def test_final_is_the_best_checkpoint_and_is_reported(done, tmp_path):
    said = check_best(done)
    line = best_line(done.folder)
    assert line["step"] == 3
    assert (said["best_step"], said["best_metric"], said["best_value"]) == (3, "loss", line["loss"])
    assert said["stopped_early"] is False
    for text in (
        (done.folder.with_suffix(".out") / "rank0.txt").read_text(),
        (done.folder / "final/README.md").read_text(),
    ):
        assert f"est: step 3, loss {line['loss']}; final/ holds it" in text
    found = kit.run_evaluation(1, tmp_path / "eval", "--checkpoint", done.folder)
    assert (found["step"], found["loss"]) == (3, line["loss"])


def test_same_command_again_keeps_the_best(tiny, copy, done):
    again = kit.run_training(1, copy, *recipe(tiny))
    check_best(again)
    assert {path.name for path in copy.iterdir()} == {path.name for path in done.folder.iterdir()}


def test_final_of_shards_is_the_best_checkpoint(tiny, tmp_path):
    env = kit.where("fsdp2", 2, mixed_precision="no")
    check_best(kit.run_training(2, tmp_path / "run", *recipe(tiny), env=env))


@pytest.mark.parametrize("lost", ["metrics.jsonl", "nothing"])
def test_best_checkpoint_survives_a_kill_and_lost_metrics(tiny, done, tmp_path, monkeypatch, lost):
    update, count = train.optimizer_step, [0]

    def dies(*args):
        count[0] += 1
        return os._exit(9) if count[0] == 8 else update(*args)

    with monkeypatch.context() as patch:
        patch.setattr(train, "optimizer_step", dies)
        with pytest.raises(kit.RankFailed):
            kit.run_training(1, tmp_path / "run", *recipe(tiny, save_steps=5))
    (tmp_path / "run" / lost).unlink(missing_ok=True)
    check_best(kit.run_training(1, tmp_path / "run", *recipe(tiny, save_steps=5)))


@pytest.mark.parametrize("how", ["deleted", "damaged"])
def test_final_is_the_last_step_without_the_best(tiny, copy, how):
    shutil.rmtree(copy / "final")
    best = copy / "checkpoints" / "step_00000003"
    if how == "deleted":
        shutil.rmtree(best)
    else:
        with open(best / "model.safetensors", "r+b") as file:
            file.write(b"x")
    run = kit.run_training(1, copy, *recipe(tiny))
    assert kit.same(run.weights, kit.load_weights(copy / "checkpoints" / "step_00000010"))
    printed = (copy.with_suffix(".out") / "rank0.txt").read_text()
    assert "best: step 3" in printed
    assert "final/ holds step 10" in printed
    assert run_status.read_status(copy)["final_step"] == 10


def test_best_checkpoint_may_have_another_name(tiny, copy):
    shutil.rmtree(copy / "final")
    (copy / "checkpoints" / "step_00000003").rename(copy / "checkpoints" / "good")
    run = kit.run_training(1, copy, *recipe(tiny))
    assert kit.same(run.weights, kit.load_weights(copy / "checkpoints" / "good"))


def test_early_stop_is_reported(tiny, tmp_path):
    run = kit.run_training(1, tmp_path / "run", *recipe(tiny, early_stopping_patience=1))
    assert run.lines[-1]["step"] == 6
    said = run_status.read_status(run.folder)
    assert (said["stopped_early"], said["best_step"], said["step"], said["status"]) == (True, 3, 6, "complete")
    printed = (run.folder.with_suffix(".out") / "rank0.txt").read_text()
    assert "stopped early at step 6 of 10: loss has not improved for 1 evaluation" in printed
    assert kit.same(run.weights, kit.load_weights(run.folder / "checkpoints" / "step_00000003"))


def test_unknown_metric_loses_no_step(tiny, tmp_path):
    (tmp_path / "here").mkdir()
    flags = [*recipe(tiny, metric_for_best_model="f1"), "--output_dir", tmp_path / "run"]
    codes, texts = kit.run_command("train.py", *flags, folder=tmp_path / "here", world=2)
    assert codes == [2, 2], texts
    assert "metric_for_best_model: an evaluation has no 'f1'" in texts[0].rstrip().splitlines()[-1]
    [saved] = checkpoint_list.list_checkpoints(tmp_path / "run")
    progress = json.loads((saved / "state.json").read_text())["progress"]
    assert (progress["step"], progress["evaluated"]) == (3, 0)
    check_best(kit.run_training(1, tmp_path / "run", *recipe(tiny)))


@pytest.mark.parametrize("name, value", [("metric_for_best_model", "loss"), ("early_stopping_patience", 2)])
def test_best_model_without_evaluation_data_is_refused(tiny, name, value):
    files = {key: path for key, path in tiny.items() if key != "validation_file"}
    with pytest.raises(UsageError, match=rf"{name} is {value}, .*validation_file"):
        kit.open_data(**files, **{name: value})
