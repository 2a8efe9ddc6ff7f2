"""The best model: saved when it is evaluated, kept, exported to final/, and reported."""

import shutil

import pytest

from engine.checkpointing import checkpoint_folder
from engine.process import run_status
from tests.engine.checkpointing import recipe
from tests.helpers import kit
from tests.helpers.backend_runs import at_step, saved
from tests.helpers.killing import train_until_killed

FIELDS = {"metric_for_best_model": "loss", "greater_is_better": True}  # so that the first evaluation is the best
FIELDS |= {"max_steps": 10, "eval_steps": 3, "save_steps": 100, "save_total_limit": 1}
FIELDS |= {"seed": 6}  # under these dropout masks the loss falls from the first evaluation on


def flags(tiny, **fields) -> list[str]:
    return recipe.flags(tiny, **FIELDS | fields)


@pytest.fixture(scope="module")
def done(tiny, tmp_path_factory) -> kit.Run:
    return kit.run_training(2, tmp_path_factory.mktemp("done") / "run", *flags(tiny))


def check_best(run: kit.Run) -> dict:
    """Assert that final/ is the model of step 3, the best one, without training state; return status.json."""
    assert saved(run.folder) == [3, 10]
    assert kit.same(run.weights, kit.load_weights(at_step(run, 3)))
    assert not kit.same(run.weights, kit.load_weights(at_step(run, 10)))
    names = {path.name for path in (run.folder / "final").iterdir()}
    assert "config.json" in names
    assert not [name for name in names if name.startswith(("optimizer", "state"))]
    status = run_status.read_status(run.folder)
    assert status["final_step"] == 3
    return status


def printed(run: kit.Run) -> str:
    return (run.folder.with_suffix(".out") / "rank0.txt").read_text()


def test_final_is_the_best_checkpoint_and_is_reported(done, tmp_path):
    status = check_best(done)
    best = max(done.kind("eval"), key=lambda line: line["loss"])
    assert (status["best_step"], status["best_metric"], status["best_value"]) == (3, "loss", best["loss"])
    assert (best["step"], status["stopped_early"]) == (3, False)
    for text in (printed(done), (done.folder / "final" / "README.md").read_text()):
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


def test_files_that_the_best_checkpoint_does_not_list_stay_there(done, tmp_path):
    """A link that another author has put beside them could publish any file of this machine."""
    best = shutil.copytree(at_step(done.folder, 3), tmp_path / "best")
    (tmp_path / "secret").write_text("token")
    (best / "README.txt").symlink_to(tmp_path / "secret")
    checkpoint_folder.copy_model(best, tmp_path / "final")
    names = {path.name for path in (done.folder / "final").iterdir()}
    assert {path.name for path in (tmp_path / "final").iterdir()} == names - {
        "README.md",
        "run_config.yaml",
        "manifest.json",
    }


@pytest.mark.parametrize("final", [3, 10])
def test_final_without_the_best_checkpoint(tiny, done, tmp_path, final):
    """An intact final/ of step 3 outlives its checkpoint; without one, final/ is the last step."""
    folder = shutil.copytree(done.folder, tmp_path / "run")
    if final == 3:
        shutil.rmtree(at_step(folder, 3))
    else:
        kit.rewind(folder, 10)
        recipe.DAMAGE["middle bit flipped"](at_step(folder, 3) / "model.safetensors")
    run = kit.run_training(1, folder, *flags(tiny))
    assert kit.same(run.weights, done.weights if final == 3 else kit.load_weights(at_step(run, 10)))
    assert "best: step 3" in printed(run)
    assert f"final/ holds step {final}" in printed(run)
    assert run_status.read_status(folder)["final_step"] == final


def test_run_that_begins_from_a_checkpoint_of_another_run_has_a_best_of_its_own(tiny, done, tmp_path):
    run = kit.run_training(1, tmp_path / "run", *flags(tiny, resume=at_step(done, 3)))
    best = max(run.kind("eval"), key=lambda line: line["loss"])["step"]
    assert run_status.read_status(run.folder)["best_step"] == best > 3
    assert kit.same(run.weights, kit.load_weights(at_step(run, best)))


def test_early_stop_is_reported(tiny, tmp_path):
    run = kit.run_training(1, tmp_path / "run", *flags(tiny, early_stopping_patience=1))
    assert run.lines[-1]["step"] == 6
    status = run_status.read_status(run.folder)
    expected = {"stopped_early": True, "best_step": 3, "step": 6, "status": "complete"}
    assert {name: status[name] for name in expected} == expected
    assert "stopped early at step 6 of 10 (evaluations in a row without a better loss: 1; " in printed(run)


def test_metric_that_no_evaluation_has(tiny, tmp_path):
    """It ends the run at the first evaluation, after a save."""
    codes, texts = recipe.command(flags(tiny, metric_for_best_model="f1"), tmp_path, world=2)
    assert codes == [2, 2], texts
    assert "metric_for_best_model: an evaluation has no 'f1'" in texts[0].rstrip().splitlines()[-1]
    assert saved(tmp_path / "run") == [3]
