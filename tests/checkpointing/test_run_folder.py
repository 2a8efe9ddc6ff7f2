"""Which run a folder holds: no two runs are mixed, and none resumes as another."""

import json
import shutil
from pathlib import Path

import pytest

from src.checkpointing import checkpoint_list
from src.checkpointing.resume import copy_best_checkpoint
from src.checkpointing.run_identity import read_lineage
from src.config.errors import UsageError
from src.runtime import run_status
from src.storage import atomic_folder
from tests.checkpointing import recipe
from tests.checkpointing.recipe import at_step, find
from tests.helpers import kit
from tests.helpers.killing import train_until_killed


def run_id(checkpoint: Path) -> str:
    return read_lineage(checkpoint)["run_id"]


def steps_of(run: kit.Run) -> list[int]:
    return [line["step"] for line in run.kind("train")]


@pytest.mark.parametrize("left", ["everything", "metrics.jsonl"])
def test_checkpoint_is_refused_in_the_folder_of_another_run(tiny, straight, interrupted, tmp_path, left):
    other, asked = interrupted(), straight[1].folder / at_step(4)
    for path in other.glob("checkpoints/*/state.json"):
        state = json.loads(path.read_text())
        path.write_text(json.dumps(state | {"lineage": {"run_id": "another", "began_from": None}}))
    if left != "everything":
        shutil.rmtree(other / "checkpoints")
    before = recipe.contents(other)
    codes, texts = recipe.command(recipe.flags(tiny, resume=asked, output_dir=other), tmp_path, world=2)
    assert codes == [2, 2], texts
    last = texts[0].rstrip().splitlines()[-1]
    assert all(text in last for text in ("resume", str(asked), "output_dir", str(other)))
    assert recipe.contents(other) == before


@pytest.mark.parametrize("at", [5, 7])
def test_fork_of_a_checkpoint_is_resumed_by_the_same_command(tiny, straight, tmp_path, at):
    """Killed before and after its first own checkpoint; by then the source may be gone."""
    source, run = shutil.copytree(straight[1].folder / at_step(4), tmp_path / "good"), tmp_path / "run"
    (tmp_path / "link").symlink_to(source)
    flags = recipe.flags(tiny, resume=f"{tmp_path / 'link'}/", save_steps=2)
    train_until_killed(at, 1, run, *flags)
    assert len(checkpoint_list.list_checkpoints(run)) == (at == 7)
    if at == 7:
        shutil.rmtree(source)
    again = kit.run_training(1, run, *flags)
    assert kit.same(again.weights, straight[1].weights)
    assert steps_of(again) == list(range(5, 13))
    ledger = [json.loads(line)["step"] for line in kit.ledger_text(run).splitlines()]
    assert ledger == [0, *range(5, 13)]
    said = (run.with_suffix(".out") / "rank0.txt").read_text()
    assert ("holds the run that began from" in said) == (at == 7)


def test_renamed_or_moved_checkpoint_is_still_of_the_run(tiny, straight, interrupted):
    run = interrupted()
    shutil.rmtree(run / at_step(8))
    good = (run / at_step(4)).rename(run / "checkpoints" / "good")
    assert find(run, recipe.flags(tiny)).folder == good
    assert recipe.same_run(kit.run_training(1, run, *recipe.flags(tiny)), straight[1])
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["good", "step_00000008", "step_00000012"]
    moved = good.rename(run / "best of all")  # out of the folder with the others
    assert find(run, recipe.flags(tiny, resume=moved)).folder == moved
    assert recipe.same_run(kit.run_training(1, run, *recipe.flags(tiny, resume=moved)), straight[1])


@pytest.mark.parametrize("how", ["link", "link/", "copy", "auto"])
def test_link_or_copy_made_by_the_user_stays(tiny, straight, interrupted, how):
    """A checkpoint that is resumed by a link to it is not archived as one that the run will write again."""
    run = interrupted()
    mine = run / "checkpoints" / "mine"
    if how == "copy":
        shutil.copytree(run / at_step(8), mine)
    else:
        mine.symlink_to("step_00000008")
    asked = {"link": mine, "link/": f"{mine}/"}.get(how)
    train_until_killed(9, 1, run, *recipe.flags(tiny, resume=asked))
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == ["mine", "step_00000004", "step_00000008"]
    assert recipe.same_run(kit.run_training(1, run, *recipe.flags(tiny)), straight[1])


def test_best_checkpoint_is_not_taken_from_another_run(tmp_path):
    """A user keeps checkpoints of several runs in one folder."""

    def keep(name: str, run: str, step: int) -> Path:
        def write(folder: Path) -> None:
            state = {"progress": {"step": step, "best_step": 2}, "lineage": {"run_id": run}}
            (folder / "state.json").write_text(json.dumps(state))
            (folder / "weights").write_text(run)

        atomic_folder.publish(tmp_path / "kept" / name, write)
        return tmp_path / "kept" / name

    keep("a", "another", 2), keep("b", "mine", 2)
    copy_best_checkpoint(keep("last", "mine", 4), tmp_path / "run", {"run_id": "new"})
    copied = tmp_path / "run" / at_step(2)
    assert (copied / "weights").read_text() == "mine"
    assert run_id(copied) == "new"


def test_fork_keeps_the_best_checkpoint_and_its_own_identity(tiny, tmp_path):
    """Killed before and after its first checkpoint, it never resumes as the run that it began from."""
    fields = {"metric_for_best_model": "loss", "greater_is_better": True, "eval_steps": 2, "save_steps": 1}
    flags = recipe.flags(tiny, **fields, max_steps=8)  # the loss falls: the first evaluation stays the best
    first, fork = kit.run_training(1, tmp_path / "first", *flags), tmp_path / "fork"
    before = recipe.contents(first.folder)
    assert run_status.read_status(first.folder)["best_step"] == 2
    again = [*flags, "--resume", first.folder / at_step(4)]
    for at, newest in ((5, 2), (7, 6)):
        train_until_killed(at, 1, fork, *again)
        assert checkpoint_list.step_of(checkpoint_list.list_checkpoints(fork)[-1]) == newest
    [own] = {run_id(path) for path in checkpoint_list.list_checkpoints(fork)}
    assert own not in {run_id(path) for path in checkpoint_list.list_checkpoints(first.folder)}
    with pytest.raises(UsageError, match=r"of another run"):
        find(fork, [*flags, "--resume", first.folder / at_step(5)])
    run = kit.run_training(1, fork, *again)
    assert steps_of(run) == [5, 6, 7, 8]
    assert recipe.contents(first.folder) == before
    assert run_status.read_status(fork)["best_step"] == 2
    shutil.rmtree(first.folder)
    assert kit.same(run.weights, kit.load_weights(fork / at_step(2)))
    assert kit.same(run.weights, first.weights)
