"""Checkpoints of FSDP2: every rank writes a part, any backend resumes, and a rank may fail meanwhile."""

import signal
import time

import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import train
from engine.checkpointing import checkpoint_folder
from engine.distributed.backends import Backend
from tests.helpers import kit
from tests.helpers.backend_runs import at_step, check_same_run, same_state, saved, where
from tests.helpers.backend_runs import fsdp2_recipe as recipe

pytestmark = pytest.mark.cluster


@pytest.fixture
def killed(fsdp2_two, tmp_path):
    """Return a function: a copy of the run on two ranks as if killed after a step."""
    return lambda step: kit.rewind(fsdp2_two.folder, step, tmp_path / "run")


# ---- checkpoints -------------------------------------------------------------------------------------------------------


def test_every_rank_writes_a_file_and_transformers_reads_them(fsdp2_two):
    assert saved(fsdp2_two.folder) == [5, 10, 15, 20]
    folder = at_step(fsdp2_two, 10)
    for part in ("model", "optimizer"):
        names = [f"{part}-0000{rank}-of-00002.safetensors" for rank in (1, 2)]
        assert {path.name for path in folder.glob(f"{part}*.safetensors")} == set(names)
        assert all(safe_open(folder / name, "pt").keys() for name in names)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert kit.same(dict(model.state_dict()), kit.load_weights(folder))


def test_more_processes_than_layers_and_rows_save_and_resume(tmp_path):
    """A layer, two embeddings, weight and bias of a norm are divided, so one of six ranks has nothing to write. Two have
    no row of a tensor of eight rows."""
    fields = {"global_batch_size": 12, "per_device_batch_size": 2, "max_steps": 4, "save_steps": 2, "logging_steps": 1}
    files = kit.tiny_files(tmp_path) | {"model_config": kit.write_yaml(tmp_path / "m.yaml", kit.TINY | {"n_embd": 8})}
    flags = kit.flags(**files | fields)
    alone = kit.run_training(1, tmp_path / "alone", *flags)
    run = kit.run_training(6, tmp_path / "run", *flags, env=where("fsdp2", 6))
    assert len(list((run.folder / "final").glob("model*.safetensors"))) == 5
    assert kit.distance(alone.weights, run.weights) <= 1e-4
    assert saved(run.folder) == [2, 4]
    again = kit.run_training(6, kit.rewind(run.folder, 2, tmp_path / "again"), *flags, env=where("fsdp2", 6))
    assert kit.same(again.weights, run.weights)


def test_mutant_resume_without_moments_is_caught(files, fsdp2_two, killed, monkeypatch):
    """As in test_killed_while_ranks_write_their_parts, with the moments of a new optimizer."""
    monkeypatch.setattr(Backend, "load_moments", lambda *args: None)
    run = kit.run_training(2, killed(15), *recipe(files), env=where("fsdp2", 2))
    assert not same_state(at_step(run, 20), at_step(fsdp2_two, 20))
    assert kit.timeless(run.folder) != kit.timeless(fsdp2_two.folder)


def test_a_run_moves_from_backend_to_backend(files, fsdp2_alone, killed, tmp_path):
    """FSDP2 on two ranks, then on three, then DDP on two, then one process; or at last HSDP on four."""
    folder = killed(5)
    kit.run_training(3, folder, *recipe(files, max_steps=10), env=where("fsdp2", 3))
    kit.run_training(2, folder, *recipe(files, max_steps=15))
    other = kit.rewind(folder, 15, tmp_path / "other")
    last = [kit.run_training(1, folder, *recipe(files))]
    last += [kit.run_training(4, other, *recipe(files), env=where("hsdp", 4))]
    for run in last:
        check_same_run(fsdp2_alone, run)
        assert saved(run.folder) == [5, 10, 15, 20]


# ---- kills, gradients that are not finite ------------------------------------------------------------------------------


def test_killed_while_ranks_write_their_parts(files, fsdp2_two, killed, tmp_path, monkeypatch):
    """When the second rank has written its part; then resumed bitwise on as many ranks."""
    folder, mark, write = killed(15), tmp_path / "written", checkpoint_folder.write_checkpoint

    def wrote(*args):
        write(*args)
        if args[-2] == 1:
            mark.touch()
            time.sleep(600)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "write_checkpoint", wrote)
        argv = [*recipe(files), "--output_dir", "run"]
        ranks = kit.Ranks("train.py", *argv, folder=tmp_path, world=2, env=where("fsdp2", 2))
        kit.until(mark.exists)
        ranks.signal(signal.SIGKILL)
        ranks.wait()
    assert list(folder.rglob(".*.parts"))
    assert checkpoint_folder.newest_intact(folder) == at_step(folder, 15)
    run = kit.run_training(2, folder, *recipe(files), env=where("fsdp2", 2))
    assert same_state(at_step(run, 20), at_step(fsdp2_two, 20))
    assert kit.timeless(folder) == kit.timeless(fsdp2_two.folder)
    assert saved(folder) == [5, 10, 15, 20]


def test_a_gradient_with_nan_in_the_shard_of_one_rank_changes_nothing_on_any(files, killed, monkeypatch):
    gradient = train.compute_gradient

    def poisoned(backend, module, batch, totals):
        result = gradient(backend, module, batch, totals)
        if batch[-1][0].step == 6 and backend.data_rank == 1:
            next(module.parameters()).grad.to_local().fill_(float("nan"))
        return result

    monkeypatch.setattr(train, "compute_gradient", poisoned)
    flags = recipe(files, max_steps=8, save_steps=1, eval_steps=99)
    run = kit.run_training(2, killed(5), *flags, env=where("fsdp2", 2))
    same = [same_state(at_step(run, number), at_step(run, number + 1)) for number in (5, 6, 7)]
    assert same == [False, True, False]
    assert run.kind("train")[-1]["skipped"]
