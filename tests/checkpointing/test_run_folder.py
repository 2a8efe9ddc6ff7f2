"""Which run a folder holds: no two runs are mixed, and none resumes as another."""

import json
import shutil
from pathlib import Path

import pytest

from src.checkpointing import checkpoint_folder
from tests.checkpointing import recipe
from tests.checkpointing.recipe import at_step, find
from tests.helpers import kit
from tests.helpers.killing import train_until_killed


def steps_of(run: kit.Run) -> list[int]:
    return [line["step"] for line in run.kind("train")]


def test_checkpoint_is_refused_in_the_folder_of_another_run(tiny, straight, interrupted, tmp_path):
    other, asked = interrupted(), straight[1].folder / at_step(4)
    for path in other.glob("checkpoints/*/state.json"):
        state = json.loads(path.read_text())
        path.write_text(json.dumps(state | {"run_id": "another"}))
    before = recipe.contents(other)
    codes, texts = recipe.command(recipe.flags(tiny, resume=asked, output_dir=other), tmp_path, world=2)
    assert codes == [2, 2], texts
    last = texts[0].rstrip().splitlines()[-1]
    assert all(text in last for text in ("resume", str(asked), "output_dir", str(other)))
    assert recipe.contents(other) == before


@pytest.mark.parametrize("at", [5, 7])
def test_fork_of_a_checkpoint_is_resumed_by_the_same_command(tiny, straight, tmp_path, at):
    """Killed before and after its first own checkpoint; by then the source may be gone. Its best evaluation is its own."""
    source, run = shutil.copytree(straight[1].folder / at_step(4), tmp_path / "good"), tmp_path / "run"
    (tmp_path / "link").symlink_to(source)
    flags = recipe.flags(tiny, resume=f"{tmp_path / 'link'}/", save_steps=2)
    train_until_killed(at, 1, run, *flags)
    assert len(checkpoint_folder.list_checkpoints(run)) == (at == 7)
    if at == 7:
        shutil.rmtree(source)
    again = kit.run_training(1, run, *flags)
    assert kit.same(again.weights, straight[1].weights)
    assert steps_of(again) == list(range(5, 13))
    ledger = [json.loads(line)["step"] for line in kit.ledger_text(run).splitlines()]
    assert ledger == [0, *range(5, 13)]
    said = (run.with_suffix(".out") / "rank0.txt").read_text()
    assert ("holds the run that began from" in said) == (at == 7)


def test_other_configuration_begins_in_a_new_folder(tiny, tmp_path):
    """Without an output_dir; the same configuration resumes, on any number of processes."""
    path, expected = kit.write_yaml(tmp_path / "chat.yaml", {"seed": 1}), {}
    other = Path(shutil.copy(tiny["train_file"], tmp_path / "rows.jsonl"))
    short, longer, elsewhere = {"max_steps": 2}, {"max_steps": 3}, {"max_steps": 2, "train_file": other}
    for fields, name, world in (
        *(
            (short, "chat", 1),
            (longer, "chat_2", 2),
            (longer, "chat_2", 1),
            (elsewhere, "chat_3", 1),
            (short, "chat", 2),
        ),
    ):
        argv = ["--config", path, *recipe.flags(tiny, **fields)]
        codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / "here", world=world)
        assert codes == [0] * world, texts
        assert ("nothing is left to train" in texts[0]) == (name in expected)
        expected |= {name: fields["max_steps"]}
        runs = (tmp_path / "here" / "runs").iterdir()
        assert {run.name: checkpoint_folder.step_of(checkpoint_folder.newest_intact(run)) for run in runs} == expected
        said = f"runs/chat holds another run (max_steps: 2 → {fields['max_steps']}): this one is in runs/{name}"
        assert "".join(texts).count(said) == (name == "chat_2")
        for run in (tmp_path / "here" / "runs").iterdir():  # from now on, the newest checkpoint is damaged
            newest = checkpoint_folder.newest_intact(run)
            shutil.copytree(newest, run / at_step(9), dirs_exist_ok=True)
            (run / at_step(9) / "state.json").unlink()


def test_renamed_or_moved_checkpoint_is_still_of_the_run(tiny, straight, interrupted):
    run = interrupted()
    shutil.rmtree(run / at_step(8))
    good = (run / at_step(4)).rename(run / "checkpoints" / "good")
    assert find(run, recipe.flags(tiny))[0] == good
    assert recipe.same_run(kit.run_training(1, run, *recipe.flags(tiny)), straight[1])
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["good", "step_00000008", "step_00000012"]
    moved = good.rename(run / "best of all")  # out of the folder with the others
    assert find(run, recipe.flags(tiny, resume=moved))[0] == moved
    assert recipe.same_run(kit.run_training(1, run, *recipe.flags(tiny, resume=moved)), straight[1])
