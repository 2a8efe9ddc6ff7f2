"""Which run a folder holds: no two runs are mixed, and none resumes as another."""

import json
import shutil
from pathlib import Path

import pytest

import train
from engine.checkpointing.checkpointer import Checkpointer
from engine.config.errors import UsageError
from engine.distributed import stop_signals
from engine.distributed.stop_signals import StopSignals
from src.training.run_logger import RunLogger
from tests.engine.checkpointing import recipe
from tests.helpers import kit
from tests.helpers.backend_runs import at_step, saved
from tests.helpers.killing import train_until_killed


def test_checkpoint_is_refused_in_the_folder_of_another_run(tiny, straight, interrupted, tmp_path):
    other, asked = interrupted(), at_step(straight[1], 4)
    for path in other.glob("checkpoints/*/state.json"):
        state = json.loads(path.read_text())
        path.write_text(json.dumps(state | {"run_id": "another"}))
    before = recipe.contents(other)
    codes, texts = recipe.command(recipe.flags(tiny, resume=asked), tmp_path, world=2)
    assert codes == [2, 2], texts
    last = texts[0].rstrip().splitlines()[-1]
    assert f"resume: {asked} is a checkpoint of another run than the one in output_dir run" in last
    assert recipe.contents(other) == before
    with pytest.raises(UsageError, match="resume: nowhere is neither a checkpoint nor a run with one"):
        recipe.finder(other, tiny, resume="nowhere")()


@pytest.mark.parametrize("at, own", [(5, False), (7, False), (7, True)])
def test_fork_of_a_checkpoint_is_resumed_by_the_same_command(tiny, straight, tmp_path, at, own):
    """Killed before and after its first own checkpoint; by then the source may be gone.

    A finished run that goes back to a checkpoint of its `own` does so once, or a job that is requeued would never end."""
    run = tmp_path / "run"
    if own:
        shutil.copytree(straight[1].folder, run)
    source = at_step(run, 4) if own else shutil.copytree(at_step(straight[1], 4), tmp_path / "good")
    flags = recipe.flags(tiny, resume=source, save_steps=2)
    train_until_killed(at, 1, run, *flags)
    assert saved(run) == ([4, 6] if own else [6] if at == 7 else [])
    assert (run / "old_final.old1").exists() == own
    if at == 7 and not own:
        shutil.rmtree(source)
    again = kit.run_training(1, run, *flags)
    assert kit.same(again.weights, straight[1].weights)
    assert [line["step"] for line in again.kind("train")] == list(range(1 if own else 5, 13))
    said = (run.with_suffix(".out") / "rank0.txt").read_text()
    assert ("holds the run that began from" in said) == (at == 7)


def test_other_configuration_begins_in_a_new_folder(tiny, tmp_path):
    """Without an output_dir; the same configuration resumes, on any number of processes."""
    path = kit.write_yaml(tmp_path / "chat.yaml", {"seed": 1})
    other = Path(shutil.copy(tiny["train_file"], tmp_path / "rows.jsonl"))
    launches = [
        ({"max_steps": 2}, "chat", 1),
        ({"max_steps": 3}, "chat_2", 2),
        ({"max_steps": 3}, "chat_2", 1),
        ({"max_steps": 2, "train_file": other}, "chat_3", 1),
    ]
    seen = set()
    for fields, name, world in launches:
        argv = ["--config", path, *recipe.flags(tiny, **fields)]
        codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / "here", world=world)
        assert codes == [0] * world, texts
        assert ("nothing is left to train" in texts[0]) == (name in seen)
        seen.add(name)
        runs = list((tmp_path / "here" / "runs").iterdir())
        assert {run.name for run in runs} == seen
        for run in runs:  # from now on, the newest checkpoint is damaged
            at_step(run, 9).mkdir(exist_ok=True)
        said = f"runs/chat holds another run (max_steps: 2 → 3): this one is in runs/{name}"
        assert "".join(texts).count(said) == (name == "chat_2")


def test_renamed_or_moved_checkpoint_is_still_of_the_run(tiny, straight, interrupted):
    run = interrupted()
    shutil.rmtree(at_step(run, 8))
    good = at_step(run, 4).rename(run / "checkpoints" / "good")
    assert recipe.finder(run, tiny)()[0] == good
    assert recipe.same_run(kit.run_training(1, run, *recipe.flags(tiny)), straight[1])
    moved = good.rename(run / "best of all")  # out of the folder with the others
    assert recipe.finder(run, tiny, resume=moved)()[0] == moved


def test_run_from_a_moved_checkpoint_that_is_stopped_at_once_saves(tiny, straight, interrupted, tmp_path, monkeypatch):
    """It says that it has saved; the folder has no checkpoint of that step, and the moved one may be gone by then."""
    run = interrupted()
    moved = at_step(run, 4).rename(tmp_path / "moved")
    with monkeypatch.context() as patch:
        patch.setattr(StopSignals, "votes", lambda signals: {"save": 0.0, "stop": 1.0})
        codes, texts = recipe.command(recipe.flags(tiny, resume=moved), tmp_path)
    assert codes == [75], texts
    assert saved(run) == [4]
    shutil.rmtree(moved)
    assert recipe.same_run(kit.run_training(1, run, *recipe.flags(tiny)), straight[1])


def _construct_alone(argv, folder) -> bool:
    """Train up to the constructors, without the methods that begin; return whether they changed nothing."""

    def end(self, *args):
        raise KeyError("constructed")

    StopSignals.listen = Checkpointer.begin = lambda self: None
    RunLogger.begin = end
    before = recipe.contents(folder)
    with pytest.raises(KeyError, match="constructed"):
        train.main([str(word) for word in argv])
    return recipe.contents(folder) == before and stop_signals._training is None


def test_constructors_change_neither_files_nor_signals(tiny, straight, tmp_path):
    """A new run in the folder of another one would rename its files, and truncate them."""
    folder = shutil.copytree(straight[1].folder, tmp_path / "run")
    argv = [*recipe.flags(tiny), "--resume", "never", "--output_dir", folder]
    assert kit.spawn(1, _construct_alone, argv, folder, out=tmp_path / "out") == [True]
