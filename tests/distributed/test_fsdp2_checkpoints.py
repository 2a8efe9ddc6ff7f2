"""Checkpoints of FSDP2: every rank writes a part, any backend resumes, and a disk or a rank may fail meanwhile."""

import errno
import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from safetensors import safe_open

import train
from src.checkpointing import checkpoint_folder
from src.distributed.backends import Backend
from src.storage import atomic_folder
from src.tasks import causal_lm
from tests.helpers import kit
from tests.helpers.backend_runs import (
    at_step,
    check_same_checkpoint,
    check_same_run,
    command,
    same_state,
    saved,
    where,
)
from tests.helpers.backend_runs import fsdp2_recipe as recipe

pytestmark = pytest.mark.cluster


def killed_after(run: kit.Run, folder: Path, step: int) -> Path:
    """Return a copy of a run as a kill after some step leaves it: lines and steps beyond its last checkpoint."""
    shutil.copytree(run.folder, folder)
    shutil.rmtree(folder / "final")
    for path in checkpoint_folder.list_checkpoints(folder):
        if checkpoint_folder.step_of(path) > step:
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
            tensors = [set(safe_open(folder / name, "pt").keys()) for name in names]
            assert all(tensors)
            assert not tensors[0] & tensors[1]


def test_transformers_reads_what_all_ranks_have_written(fsdp2_two):
    from transformers import AutoModelForCausalLM

    folder = "checkpoints/step_00000010"
    model, info = AutoModelForCausalLM.from_pretrained(fsdp2_two.folder / folder, output_loading_info=True)
    assert not any(info.values())
    assert kit.same(dict(model.state_dict()), kit.load_weights(fsdp2_two.folder / folder))


def test_a_checkpoint_holds_what_that_of_one_process_holds(fsdp2_alone, fsdp2_two):
    for number in (5, 20):
        check_same_checkpoint(fsdp2_alone, fsdp2_two, number, 2e-6)
        states = [checkpoint_folder.read_state(at_step(run, number)) for run in (fsdp2_alone, fsdp2_two)]
        norms = [state["progress"].pop("grad_norm") for state in states]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)  # shards are summed in another order
        assert states[0]["progress"] | {"best": 0} == states[1]["progress"] | {"best": 0}
        assert states[0]["numbers"] == states[1]["numbers"]


def test_more_processes_than_layers_save(tmp_path):
    """A layer, two embeddings, weight and bias of a norm are divided, so one of six ranks has nothing to write."""
    fields = {"global_batch_size": 12, "per_device_batch_size": 2, "max_steps": 4, "save_steps": 2, "logging_steps": 1}
    flags = kit.flags(**kit.tiny_files(tmp_path) | fields)
    alone = kit.run_training(1, tmp_path / "alone", *flags)
    run = kit.run_training(6, tmp_path / "run", *flags, env=where("fsdp2", 6))
    assert len(list((run.folder / "final").glob("model*.safetensors"))) == 5
    assert kit.distance(alone.weights, run.weights) <= 1e-4
    assert saved(run.folder) == [2, 4]


@pytest.mark.parametrize("mutant", [False, True])
def test_resume_on_as_many_ranks_is_bitwise(files, fsdp2_two, tmp_path, monkeypatch, mutant):
    """The mutant leaves the moments as they are in a new optimizer."""
    if mutant:
        monkeypatch.setattr(Backend, "load_moments", lambda *args: None)
    folder = killed_after(fsdp2_two, tmp_path / "run", 15)
    run = kit.run_training(2, folder, *recipe(files), env=where("fsdp2", 2))
    assert kit.same(run.weights, fsdp2_two.weights) == (not mutant)
    assert same_state(at_step(run, 20), at_step(fsdp2_two, 20)) == (not mutant)
    assert (kit.timeless(run.folder) == kit.timeless(fsdp2_two.folder)) == (not mutant)


def test_a_run_moves_from_backend_to_backend(files, fsdp2_alone, fsdp2_two, tmp_path):
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


def at_write(monkeypatch, number: int, rank: int, act) -> None:
    """Let `act` happen on one rank when it has written its part of a checkpoint."""
    write = checkpoint_folder.write_checkpoint

    def wrote(folder, model_with_loss, tensors, state, rank_of_file=0, world=1):
        write(folder, model_with_loss, tensors, state, rank_of_file, world)
        if rank_of_file == rank and state["progress"]["step"] == number:
            act()

    monkeypatch.setattr(checkpoint_folder, "write_checkpoint", wrote)


def disk_full():
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_on_one_rank_costs_a_checkpoint(files, fsdp2_two, tmp_path, monkeypatch):
    at_write(monkeypatch, 15, 1, disk_full)
    folder = killed_after(fsdp2_two, tmp_path / "here" / "run", 10)
    codes, outputs = command(recipe(files), tmp_path / "here")
    assert codes == [0, 0], outputs
    assert "No space left on device" in outputs[0]
    assert saved(folder) == [5, 10, 20]
    assert same_state(at_step(folder, 20), at_step(fsdp2_two, 20))


def test_killed_while_ranks_write_their_parts(files, fsdp2_two, tmp_path, monkeypatch):
    folder, mark = killed_after(fsdp2_two, tmp_path / "here" / "run", 15), tmp_path / "written"
    with monkeypatch.context() as patch:
        at_write(patch, 20, 1, lambda: (mark.touch(), time.sleep(600)))
        argv = [*recipe(files), "--output_dir", "run"]
        ranks = kit.Ranks("train.py", *argv, folder=folder.parent, world=2, env=where("fsdp2", 2))
        kit.until(mark.exists)
        ranks.signal(signal.SIGKILL)
        assert ranks.wait() == [-signal.SIGKILL] * 2
    assert list(folder.rglob(".*.parts"))
    assert checkpoint_folder.newest_intact(folder) == at_step(folder, 15)
    assert not (folder / "final").exists()
    run = kit.run_training(2, folder, *recipe(files), env=where("fsdp2", 2))
    assert kit.same(run.weights, fsdp2_two.weights)
    assert saved(folder) == [5, 10, 15, 20]


def poison(monkeypatch, number: int) -> None:
    """Let the loss of the second of two ranks be NaN in one step."""
    gradient, loss = train.compute_gradient, causal_lm.Task.loss

    def poisoned(backend, module, batch, weight):
        wrong = batch[-1][0].step + 1 == number and backend.data_rank == 1
        module.task.factor = float("nan") if wrong else 1.0
        return gradient(backend, module, batch, weight)

    def loss_of(self, *args):
        sums = loss(self, *args)
        return sums | {"loss": sums["loss"] * getattr(self, "factor", 1.0)}

    monkeypatch.setattr(train, "compute_gradient", poisoned)
    monkeypatch.setattr(causal_lm.Task, "loss", loss_of)


def test_a_nan_loss_on_one_rank_changes_nothing_on_any(files, fsdp2_two, tmp_path, monkeypatch):
    poison(monkeypatch, 7)
    folder = killed_after(fsdp2_two, tmp_path / "run", 5)
    flags = recipe(files, max_steps=8, save_steps=1, eval_steps=99)
    run = kit.run_training(2, folder, *flags, env=where("fsdp2", 2))
    same = [same_state(at_step(run, number), at_step(run, number + 1)) for number in (5, 6, 7)]
    assert same == [False, True, False]
    assert run.kind("train")[-1]["skipped"]
