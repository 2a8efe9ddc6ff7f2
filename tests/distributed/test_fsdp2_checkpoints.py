"""Checkpoints of FSDP2: every rank writes a part, any strategy resumes, and a disk or a rank may fail meanwhile."""

import errno
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import train
from src.checkpointing import checkpoint_format, checkpoint_list, model_folder, sharded_checkpoint
from src.distributed.strategies import Strategy
from src.storage import atomic_folder
from src.tasks import causal_lm
from tests.helpers import kit
from tests.helpers.strategy_runs import (
    at_step,
    check_same_checkpoint,
    check_same_run,
    command,
    same_state,
    saved,
    where,
)
from tests.helpers.strategy_runs import fsdp2_recipe as recipe

pytestmark = pytest.mark.cluster


def killed_after(run: kit.Run, folder: Path, step: int) -> Path:
    """Return a copy of a run as a kill after some step leaves it: lines and steps beyond its last checkpoint."""
    shutil.copytree(run.folder, folder)
    shutil.rmtree(folder / "final")
    for path in checkpoint_list.list_checkpoints(folder):
        if checkpoint_list.step_of(path) > step:
            shutil.rmtree(path)
    return folder


# ---- checkpoints -------------------------------------------------------------------------------------------------------


def test_every_rank_writes_a_file_and_none_holds_a_pickle(fsdp2_two):
    assert saved(fsdp2_two.folder) == [5, 10, 15, 20]
    suffixes = {path.suffix for path in fsdp2_two.folder.rglob("*") if path.is_file()}
    assert suffixes <= {".safetensors", ".json", ".jsonl", ".yaml", ".md", ".log", ".diff", ".lock"}
    for folder, parts in ((at_step(fsdp2_two, 10), ("model", "optimizer")), (fsdp2_two.folder / "final", ("model",))):
        listed = json.loads((folder / atomic_folder.MANIFEST).read_text())["files"]
        for part in parts:
            names = [f"{part}-0000{rank}-of-00002.safetensors" for rank in (1, 2)]
            assert set(names) <= listed.keys()
            held = [set(safe_open(folder / name, "pt").keys()) for name in names]
            assert all(held)
            assert not held[0] & held[1]


@pytest.mark.parametrize("folder", ["checkpoints/step_00000010", "final"])
def test_transformers_reads_what_all_ranks_have_written(fsdp2_two, folder):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(fsdp2_two.folder / folder, output_loading_info=True)
    assert not any(info.values())
    assert kit.same(dict(model.state_dict()), kit.load_weights(fsdp2_two.folder / folder))


def test_a_checkpoint_holds_what_that_of_one_process_holds(fsdp2_alone, fsdp2_two):
    for number in (5, 20):
        check_same_checkpoint(fsdp2_alone, fsdp2_two, number, 2e-6)
        states = [checkpoint_list.read_state(at_step(run, number)) for run in (fsdp2_alone, fsdp2_two)]
        norms = [state["progress"].pop("grad_norm") for state in states]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)  # shards are summed in another order
        assert states[0]["progress"] | {"best": 0} == states[1]["progress"] | {"best": 0}
        assert states[0]["numbers"] == states[1]["numbers"]


@pytest.mark.parametrize("world", [1, 6])
def test_one_process_and_more_processes_than_layers_save(tmp_path, world):
    """A layer, two embeddings, weight and bias of a norm are divided, so one of six ranks has nothing to write."""
    fields = {"global_batch_size": 12, "per_device_batch_size": 2, "max_steps": 4, "save_steps": 2, "logging_steps": 1}
    flags = kit.flags(**kit.tiny_files(tmp_path) | fields)
    alone = kit.run_training(1, tmp_path / "alone", *flags)
    run = kit.run_training(world, tmp_path / "run", *flags, env=where("fsdp2", world))
    assert len(list((run.folder / "final").glob("model*.safetensors"))) == min(world, 5)
    assert kit.distance(alone.weights, run.weights) <= 1e-4
    assert saved(run.folder) == [2, 4]
    shutil.rmtree(at_step(run, 4))
    again = kit.run_training(2, run.folder, *flags, env=where("fsdp2", 2))
    assert again.losses() == pytest.approx(alone.losses(), rel=1e-6)


@pytest.mark.parametrize("mutant", [False, True])
def test_resume_on_as_many_ranks_is_bitwise(files, fsdp2_two, tmp_path, monkeypatch, mutant):
    """The mutant leaves the moments as they are in a new optimizer."""
    if mutant:
        monkeypatch.setattr(Strategy, "load_moments", lambda *args: None)
    folder = killed_after(fsdp2_two, tmp_path / "run", 15)
    run = kit.run_training(2, folder, *recipe(files), env=where("fsdp2", 2))
    assert kit.same(run.weights, fsdp2_two.weights) == (not mutant)
    assert same_state(at_step(run, 20), at_step(fsdp2_two, 20)) == (not mutant)
    assert (kit.timeless(run.folder) == kit.timeless(fsdp2_two.folder)) == (not mutant)


def test_a_run_moves_from_strategy_to_strategy(files, fsdp2_alone, fsdp2_two, tmp_path):
    """FSDP2 on two ranks, then on three, then DDP on two, then one process; or at last HSDP on four."""
    folder = killed_after(fsdp2_two, tmp_path / "run", 5)
    kit.run_training(3, folder, *recipe(files, max_steps=10), env=where("fsdp2", 3))
    kit.run_training(2, folder, *recipe(files, max_steps=15))
    shutil.copytree(folder, tmp_path / "other")
    last = [kit.run_training(1, folder, *recipe(files))]
    last += [kit.run_training(4, tmp_path / "other", *recipe(files), env=where("hsdp", 4))]
    for run in last:
        check_same_run(fsdp2_alone, run)
        assert saved(run.folder) == [5, 10, 15, 20]


def test_a_flipped_bit_in_the_file_of_another_rank_is_found(files, fsdp2_two, tmp_path):
    folder = killed_after(fsdp2_two, tmp_path / "run", 15)
    file = at_step(folder, 15) / "model-00002-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    run = kit.run_training(2, folder, *recipe(files), env=where("fsdp2", 2))
    assert file.name in (tmp_path / "run.out" / "rank0.txt").read_text()
    assert kit.same(run.weights, fsdp2_two.weights)


# ---- disks that fail, kills, losses that are not finite ----------------------------------------------------------------


def at_write(monkeypatch, number, rank: int, act) -> None:
    """Let `act` happen on one rank when it has written its part of a checkpoint, or of the "final" model."""
    write, export = checkpoint_format.write_checkpoint, model_folder.write_model

    def wrote(folder, model_with_loss, tensors, state, mine=0, world=1):
        write(folder, model_with_loss, tensors, state, mine, world)
        if mine == rank and state["progress"]["step"] == number:
            act()

    monkeypatch.setattr(checkpoint_format, "write_checkpoint", wrote)
    if number == "final":
        monkeypatch.setattr(
            model_folder, "write_model", lambda *args: (export(*args), act() if args[3] == rank else None)
        )


def disk_full():
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_costs_a_checkpoint(files, fsdp2_two, tmp_path, monkeypatch, rank):
    at_write(monkeypatch, 15, rank, disk_full)
    folder = killed_after(fsdp2_two, tmp_path / "here" / "run", 10)
    codes, outputs = command(recipe(files), tmp_path / "here")
    assert codes == [0, 0], outputs
    assert "No space left on device" in outputs[0]
    assert saved(folder) == [5, 10, 20]
    assert same_state(at_step(folder, 20), at_step(fsdp2_two, 20))


def test_a_rank_whose_disk_takes_nothing_costs_no_more(files, fsdp2_two, tmp_path, monkeypatch):
    """At steps 12 and 16; the success in between resets the count of failures on all ranks."""
    writers, calls, collected = sharded_checkpoint.ShardWriters, [0], [0]
    write_shard, collect_shards = writers.write_shard, writers.collect_shards

    def failing(self, parts, write):
        calls[0] += 1
        if calls[0] in (1, 3):
            disk_full()
        return write_shard(self, parts, write)

    def collect(self, *args):  # impatient only where nothing comes, so that a busy machine costs nothing
        collected[0] += 1
        return collect_shards(self._replace(patience=0.5) if collected[0] in (1, 3) else self, *args)

    monkeypatch.setattr(writers, "write_shard", failing)
    monkeypatch.setattr(writers, "collect_shards", collect)
    folder = killed_after(fsdp2_two, tmp_path / "here" / "run", 10)
    codes, outputs = command(recipe(files, save_steps=2, max_failed_saves=2), tmp_path / "here")
    assert codes == [0, 0], outputs
    assert "rank 1" in outputs[0]
    assert saved(folder) == [5, 10, 14, 18, 20]
    assert kit.same(kit.Run(folder).weights, fsdp2_two.weights)


def test_a_final_model_that_one_rank_cannot_write(files, fsdp2_two, tmp_path, monkeypatch):
    folder, flags = tmp_path / "here", [*recipe(files), "--resume", at_step(fsdp2_two, 15)]
    with monkeypatch.context() as patch:
        at_write(patch, "final", 1, disk_full)
        codes, outputs = command(flags, folder)
    assert codes == [1, 1], outputs
    assert "No space left on device, on rank 1" in outputs[0]
    run = kit.run_training(2, folder / "run", *recipe(files), env=where("fsdp2", 2))
    assert kit.same(run.weights, fsdp2_two.weights)
    assert saved(run.folder) == [20]


@pytest.mark.parametrize("number", [20, "final"])
def test_killed_while_ranks_write_their_parts(files, fsdp2_two, tmp_path, monkeypatch, number):
    folder, mark = killed_after(fsdp2_two, tmp_path / "here" / "run", 15), tmp_path / "written"
    with monkeypatch.context() as patch:
        at_write(patch, number, 1, lambda: (mark.touch(), time.sleep(600)))
        argv = [*recipe(files), "--output_dir", "run"]
        ranks = kit.Ranks("train.py", *argv, folder=folder.parent, world=2, env=where("fsdp2", 2))
        kit.until(mark.exists)
        ranks.signal(signal.SIGKILL)
        assert ranks.wait() == [-signal.SIGKILL] * 2
    assert list(folder.rglob(".*.parts"))
    assert checkpoint_list.newest_intact(folder) == at_step(folder, 15 if number == 20 else 20)
    assert not (folder / "final").exists()
    run = kit.run_training(2, folder, *recipe(files), env=where("fsdp2", 2))
    assert kit.same(run.weights, fsdp2_two.weights)
    assert saved(folder) == [5, 10, 15, 20]


def test_error_on_one_rank_does_not_cost_the_checkpoint_in_progress(files, tmp_path, monkeypatch):
    """Both ranks still write their parts when rank 1 fails."""
    update, calls = train.optimizer_step, [0]

    def failing(*args):
        calls[0] += 1
        if calls[0] == 7 and int(os.environ["RANK"]) == 1:
            raise ValueError("a cosmic ray")
        return update(*args)

    monkeypatch.setattr(train, "optimizer_step", failing)
    for rank in (0, 1):
        at_write(monkeypatch, 5, rank, lambda: time.sleep(4))
    codes, outputs = command(recipe(files), tmp_path / "here")
    assert codes == [1, 1], outputs
    assert saved(tmp_path / "here" / "run") == [5]


def poison(monkeypatch, number: int) -> None:
    """Let the loss of the second of two ranks be NaN in one step."""
    gradient, loss = train.compute_gradient, causal_lm.Task.loss

    def spoiled(strategy, module, window, weight):
        wrong = window[-1][0].step + 1 == number and strategy.data_rank == 1
        module.task.factor = float("nan") if wrong else 1.0
        return gradient(strategy, module, window, weight)

    def loss_of(self, *args):
        sums = loss(self, *args)
        return sums | {"loss": sums["loss"] * getattr(self, "factor", 1.0)}

    monkeypatch.setattr(train, "compute_gradient", spoiled)
    monkeypatch.setattr(causal_lm.Task, "loss", loss_of)


def naive_update(strategy, module, optimizer, learning_rate, max_grad_norm):
    norm = strategy.accelerator.clip_grad_norm_(module.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm.full_tensor(), torch.tensor(False)


@pytest.mark.parametrize("mutant", [False, True])
def test_a_nan_loss_on_one_rank_changes_nothing_on_any(files, fsdp2_two, tmp_path, monkeypatch, mutant):
    poison(monkeypatch, 7)
    if mutant:
        monkeypatch.setattr(train, "optimizer_step", naive_update)
    folder = killed_after(fsdp2_two, tmp_path / "run", 5)
    flags = recipe(files, max_steps=8, save_steps=1, eval_steps=99)
    run = kit.run_training(2, folder, *flags, env=where("fsdp2", 2))
    same = [same_state(at_step(run, number), at_step(run, number + 1)) for number in (5, 6, 7)]
    assert same == [False, not mutant, False]
    assert run.kind("train")[-1]["skipped"] == (not mutant)
    assert any(value.isnan().any() for value in run.weights.values()) == mutant
