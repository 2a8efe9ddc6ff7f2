"""Checkpoints: complete or not at all, no pickle, and a run that was killed goes on as if nothing had happened."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from src.data import data_loader
from tests.helpers import kit

STEPS = 40  # of 32 examples: the tail of the first epoch is step 32


def recipe(files, **flags):
    values = {
        "model_config": files / "gpt2.yaml",  # with dropout
        "train_file": files / "train.jsonl",
        "validation_file": files / "validation.jsonl",
        "per_device_batch_size": 4,
        "max_steps": STEPS,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "eval_steps": 20,
        "save_steps": 5,
    } | flags
    return [word for name, value in values.items() for word in (f"--{name}", value)]


@pytest.fixture(scope="module")
def straight(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    return {world: kit.run_training(world, folder / f"{world}", *recipe(files)) for world in (1, 2)}


def killed_and_resumed(files, folder, worlds, at, monkeypatch) -> kit.Run:
    with monkeypatch.context() as patch:
        kit.exit_in_update(at, patch, after_saves=False)
        with pytest.raises(kit.RankFailed):
            kit.run_training(worlds[0], folder, *recipe(files))
    return kit.run_training(worlds[1], folder, *recipe(files))


@pytest.mark.parametrize("world, at", [(1, 3), (1, 23), (2, 33), (2, 34)])
def test_killed_and_resumed_is_bitwise_the_same(files, straight, tmp_path, monkeypatch, world, at):
    """At step 3 (nothing saved), 23 (mid-epoch), 33 and 34 (after the exact tail and the epoch's end)."""
    run = killed_and_resumed(files, tmp_path / "run", (world, world), at, monkeypatch)
    assert kit.same(run.weights, straight[world].weights)
    optimizers = [
        load_file(r.folder / f"checkpoints/step_{STEPS:08d}/optimizer.safetensors") for r in (run, straight[world])
    ]
    assert kit.same(*optimizers)
    timeless = [
        [{k: v for k, v in line.items() if "second" not in k} for line in r.lines] for r in (run, straight[world])
    ]
    assert timeless[0] == timeless[1]  # no line of metrics.jsonl is lost, repeated or different


def test_mutant_that_forgets_where_it_was_is_caught(files, straight, tmp_path, monkeypatch):
    """The order replayed from its start, as after accelerate's load_state."""
    original = data_loader.training_order

    def from_the_start(config, rank, world, start, stop):
        return original(config, rank, world, 0, stop - start)

    with monkeypatch.context() as patch:
        kit.exit_in_update(23, patch, after_saves=False)
        with pytest.raises(kit.RankFailed):
            kit.run_training(1, tmp_path / "run", *recipe(files))
    monkeypatch.setattr(data_loader, "training_order", from_the_start)
    assert not kit.same(kit.run_training(1, tmp_path / "run", *recipe(files)).weights, straight[1].weights)


def test_stopped_on_two_processes_and_resumed_on_one(files, tmp_path, monkeypatch):
    flags = recipe(files, dtype="float64", max_steps=12)
    whole = kit.run_training(1, tmp_path / "whole", *flags)
    with monkeypatch.context() as patch:
        kit.exit_in_update(8, patch, after_saves=False)
        with pytest.raises(kit.RankFailed):
            kit.run_training(2, tmp_path / "run", *flags)
    run = kit.run_training(1, tmp_path / "run", *flags)
    assert kit.distance(run.weights, whole.weights) <= 1e-10
    assert run.lines[0]["step"] == 1
    assert [line["step"] for line in run.kind("train")] == list(range(1, 13))


def test_a_run_holds_no_pickle_and_only_the_checkpoints_asked_for(straight):
    for run in straight.values():
        names = {path.suffix for path in run.folder.rglob("*") if path.is_file()}
        assert names <= {".safetensors", ".json", ".jsonl", ".yaml", ".md", ".log"}
        assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == [
            "step_00000035",
            "step_00000040",
        ]


def test_a_torn_checkpoint_is_not_taken_for_one(files, straight, tmp_path, monkeypatch):
    """A kill while the files are written leaves a temporary folder, which nobody reads and the next save removes."""
    from src.checkpointing import checkpoint_list, format

    original = format.save_file

    def die(tensors, path):
        if "step_00000020" in str(path):
            os._exit(9)
        return original(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(format, "save_file", die)
        with pytest.raises(kit.RankFailed):
            kit.run_training(1, tmp_path / "run", *recipe(files))
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert left == [".step_00000020.tmp", "step_00000010", "step_00000015"]
    assert checkpoint_list.newest_intact(tmp_path / "run").name == "step_00000015"
    run = kit.run_training(1, tmp_path / "run", *recipe(files))
    assert kit.same(run.weights, straight[1].weights)


def test_a_finished_run_says_so_and_changes_nothing(files, straight, tmp_path):
    import shutil

    shutil.copytree(straight[1].folder, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    again = kit.run_training(1, tmp_path / "run", *recipe(files))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert kit.same(again.weights, straight[1].weights)
    assert "nothing is left to train" in (tmp_path / "run.out" / "rank0.txt").read_text()


def test_resume_never_starts_anew_and_loses_nothing(files, tmp_path):
    flags = recipe(files, max_steps=4, save_steps=2, eval_steps=4)
    first = kit.run_training(1, tmp_path / "run", *flags)
    second = kit.run_training(1, tmp_path / "run", *flags, "--resume", "never")
    assert kit.same(first.weights, second.weights)
    assert sorted(path.name for path in (tmp_path / "run").glob("*.old1")) == [
        "checkpoints.old1",
        "final.old1",
        "ledger.jsonl.old1",
        "metrics.jsonl.old1",
    ]


def test_another_run_in_the_folder_is_refused_by_all_ranks(files, tmp_path):
    flags = recipe(files, max_steps=4, save_steps=2, eval_steps=4)
    kit.run_training(1, tmp_path / "run", *flags)
    with pytest.raises(kit.RankFailed) as failed:
        kit.run_training(2, tmp_path / "run", *flags, "--seed", 7, "--global_batch_size", 16)
    assert str(failed.value).count("seed: 42 → 7; global_batch_size: 32 → 16") >= 2


def test_resume_takes_a_folder_or_refuses_it(files, straight, tmp_path):
    checkpoint = straight[1].folder / "checkpoints" / "step_00000035"
    run = kit.run_training(1, tmp_path / "fork", *recipe(files), "--resume", checkpoint)
    assert kit.same(run.weights, straight[1].weights)
    assert "Resuming from step" in (tmp_path / "fork.out" / "rank0.txt").read_text()
    with pytest.raises(kit.RankFailed, match="neither a checkpoint nor a run with one"):
        kit.run_training(1, tmp_path / "none", *recipe(files), "--resume", files)


def test_state_is_a_few_integers(straight):
    state = json.loads((straight[1].folder / "checkpoints" / "step_00000040" / "state.json").read_text())
    assert {k: state["progress"][k] for k in ("step", "updates", "skipped")} == {
        "step": 40,
        "updates": 40,
        "skipped": 0,
    }
    moments = load_file(straight[1].folder / "checkpoints" / "step_00000040" / "optimizer.safetensors")
    assert {name.split("/")[0] for name in moments} == {"exp_avg", "exp_avg_sq", "step"}
    assert all("module." not in name and "_orig_mod" not in name for name in moments)
    assert torch.equal(moments["step/transformer.wte.weight"], torch.tensor(40.0))
