"""The best model: saved when it is evaluated, kept, exported to final/, and reported."""

import shutil
from pathlib import Path

import pytest

from src.checkpointing import checkpoint_folder
from src.config.errors import UsageError
from src.runtime import run_status
from tests.checkpointing import recipe
from tests.checkpointing.recipe import at_step
from tests.helpers import kit
from tests.helpers.killing import train_until_killed

FIELDS = {"metric_for_best_model": "loss", "greater_is_better": True}  # so that the first evaluation is the best
FIELDS |= {"max_steps": 10, "eval_steps": 3, "save_steps": 100, "save_total_limit": 1}


def flags(tiny, **fields) -> list[str]:
    return recipe.flags(tiny, **FIELDS | fields)


@pytest.fixture(scope="module")
def done(tiny, tmp_path_factory) -> kit.Run:
    return kit.run_training(2, tmp_path_factory.mktemp("done") / "run", *flags(tiny))


@pytest.fixture
def copy(done, tmp_path):
    """A copy of that run's folder without the final model, to be changed."""
    folder = shutil.copytree(done.folder, tmp_path / "run")
    shutil.rmtree(folder / "final")
    return folder


def check_best(run: kit.Run, step: int = 3) -> dict:
    """Assert that final/ is the model of `step`, the best one, without training state; return status.json."""
    assert [checkpoint_folder.step_of(path) for path in checkpoint_folder.list_checkpoints(run.folder)] == [step, 10]
    assert kit.same(run.weights, kit.load_weights(run.folder / at_step(step)))
    assert not kit.same(run.weights, kit.load_weights(run.folder / at_step(10)))
    names = {path.name for path in (run.folder / "final").iterdir()}
    assert "config.json" in names
    assert not [name for name in names if name.startswith(("optimizer", "state"))]
    status = run_status.read_status(run.folder)
    assert status["final_step"] == step
    return status


def printed(folder: Path) -> str:
    return (folder.with_suffix(".out") / "rank0.txt").read_text()


def test_final_is_the_best_checkpoint_and_is_reported(done, tmp_path):
    status = check_best(done)
    best = max(done.kind("eval"), key=lambda line: line["loss"])
    assert (status["best_step"], status["best_metric"], status["best_value"]) == (3, "loss", best["loss"])
    assert (best["step"], status["stopped_early"]) == (3, False)
    for text in (printed(done.folder), (done.folder / "final" / "README.md").read_text()):
        assert f"est: step 3, loss {best['loss']}; final/ holds step 3" in text
    found = kit.run_evaluation(1, tmp_path / "eval", "--checkpoint", done.folder)
    assert (found["step"], found["loss"]) == (3, best["loss"])


def test_final_of_shards_is_the_best_checkpoint(tiny, tmp_path):
    env = kit.where("fsdp2", 2, mixed_precision="no")
    check_best(kit.run_training(2, tmp_path / "run", *flags(tiny), env=env))


def test_best_checkpoint_survives_a_kill_and_lost_metrics(tiny, tmp_path):
    run = tmp_path / "run"
    train_until_killed(8, 1, run, *flags(tiny, save_steps=5))
    (run / "metrics.jsonl").unlink()
    check_best(kit.run_training(1, run, *flags(tiny, save_steps=5)))


@pytest.mark.parametrize("how", ["renamed", "damaged"])
def test_final_without_the_best_checkpoint_is_the_last_step(tiny, copy, how):
    """A renamed checkpoint is still found."""
    best = copy / at_step(3)
    if how == "renamed":
        best.rename(best.with_name("good"))
    else:
        recipe.DAMAGE["first bit flipped"](best / "model.safetensors")
    run = kit.run_training(1, copy, *flags(tiny))
    if how == "renamed":
        assert kit.same(run.weights, kit.load_weights(best.with_name("good")))
        return
    assert kit.same(run.weights, kit.load_weights(copy / at_step(10)))
    assert "best: step 3" in printed(copy)
    assert "final/ holds step 10" in printed(copy)
    assert run_status.read_status(copy)["final_step"] == 10


def test_early_stop_is_reported(tiny, tmp_path):
    run = kit.run_training(1, tmp_path / "run", *flags(tiny, early_stopping_patience=1))
    assert run.lines[-1]["step"] == 6
    status = run_status.read_status(run.folder)
    expected = {"stopped_early": True, "best_step": 3, "step": 6, "status": "complete"}
    assert {name: status[name] for name in expected} == expected
    assert "stopped early at step 6 of 10: loss has not improved for 1 evaluation" in printed(run.folder)
    assert kit.same(run.weights, kit.load_weights(run.folder / at_step(3)))


def test_unknown_metric_ends_at_the_first_evaluation_after_a_save(tiny, tmp_path):
    codes, texts = recipe.command(flags(tiny, metric_for_best_model="f1"), tmp_path, world=2)
    assert codes == [2, 2], texts
    assert "metric_for_best_model: an evaluation has no 'f1'" in texts[0].rstrip().splitlines()[-1]
    assert [checkpoint_folder.step_of(path) for path in checkpoint_folder.list_checkpoints(tmp_path / "run")] == [3]


@pytest.mark.parametrize("name, value", [("metric_for_best_model", "loss"), ("early_stopping_patience", 2)])
def test_best_model_without_evaluation_data_is_refused(tiny, name, value):
    files = {key: path for key, path in tiny.items() if key != "validation_file"}
    with pytest.raises(UsageError, match=rf"{name} is {value}, .*validation_file"):
        kit.open_data(**files, **{name: value})
