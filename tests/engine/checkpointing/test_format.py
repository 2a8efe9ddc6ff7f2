"""The contents of a checkpoint: safetensors and JSON, canonical names, everything that training needs."""

import hashlib
import json
import shutil

import torch

import train
from engine.checkpointing import checkpoint_folder
from engine.checkpointing.async_writer import HostCopy
from tests.engine.checkpointing import recipe
from tests.helpers import kit
from tests.helpers.backend_runs import at_step
from tests.helpers.fp16 import with_scaler
from tests.helpers.killing import train_until_killed

FILES = ["config.json", "generation_config.json", "manifest.json", "model.safetensors", "optimizer.safetensors"]
FILES += ["state.json"]


def test_checkpoint_is_safetensors_and_json_without_pickle(straight):
    for run in straight.values():
        for step in (4, 8, 12):
            assert sorted(path.name for path in at_step(run, step).rglob("*")) == FILES
        suffixes = {path.suffix for path in run.folder.rglob("*") if path.is_file()}
        assert suffixes <= {".safetensors", ".json", ".jsonl", ".yaml", ".md", ".log", ".diff", ".lock"}


def test_hash_of_the_weights(straight):
    """In state.json, status.json and the model card, which here is of the same step; docs/tracking.md computes it, too."""
    run = straight[1].folder
    weights = kit.load_weights(at_step(run, 12))
    rows = [
        [name, "F32", list(value.shape), hashlib.sha256(value.numpy().tobytes()).hexdigest()]
        for name, value in sorted(weights.items())
    ]
    expected = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    assert checkpoint_folder.read_state(at_step(run, 12))["weights_sha256"] == expected
    assert checkpoint_folder.read_state(at_step(run, 8))["weights_sha256"] != expected
    assert json.loads((run / "status.json").read_text())["weights_sha256"] == expected
    assert expected in (run / "final" / "README.md").read_text()
    printed = (run.with_suffix(".out") / "rank0.txt").read_text()
    assert expected in printed
    assert f"{expected[:16]}\n" in printed


def test_names_are_canonical_and_tied_weights_stored_once(straight):
    from transformers import GPT2LMHeadModel

    folders = [at_step(straight[world], 12) for world in (1, 2)]
    plain = GPT2LMHeadModel.from_pretrained(folders[0])
    assert plain.lm_head.weight is plain.transformer.wte.weight
    names = {name for name, _ in plain.named_parameters()}  # each once, under its first name
    for folder in folders:
        assert kit.load_weights(folder).keys() == names
        moments = kit.load_weights(folder, "optimizer")
        assert {name.split("/", 1)[1] for name in moments} == names
        assert {name.split("/")[0] for name in moments} == {"exp_avg", "exp_avg_sq", "step"}
        assert torch.equal(moments["step/transformer.wte.weight"], torch.tensor(12.0))


def test_host_copy_of_views_of_one_memory():
    weight = torch.arange(6.0).view(2, 3)
    tensors = {"model": {"a": weight, "tied": weight, "row": weight[:1], "transposed": weight.t()}}
    copies = HostCopy().take(tensors)["model"]
    assert copies["a"] is copies["tied"]
    assert all(torch.equal(copies[name], value) for name, value in tensors["model"].items())


class OnGPU(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


def test_memory_of_an_early_save_is_not_reserved_again(monkeypatch):
    """It may still be written from, so host memory would be taken twice. tests/gpu has what a GPU needs."""
    empty, sizes = torch.empty, []

    def note(shape, dtype, pin_memory):
        sizes.append((*shape, pin_memory))
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", note)
    weight, moment = (torch.ones(size).as_subclass(OnGPU) for size in (3, 4))
    memory = HostCopy()
    memory.take({"model": {"weight": weight}})
    memory.reserve({"model": {"weight": weight, "tied": weight}, "optimizer": {"exp_avg/weight": moment}})
    memory.reserving.join()
    assert sizes == [(3, True), (4, True)]


def test_gradient_scaler_survives_a_kill(tiny, tmp_path, monkeypatch):
    """It begins so high that the first updates overflow, and doubles every third update that does not. The mutant
    begins with a new one after the kill."""
    scaled = with_scaler(train.init_accelerator, 2.0**22, growth_interval=3)
    monkeypatch.setattr(train, "init_accelerator", scaled)
    flags = recipe.flags(tiny, max_steps=16, save_steps=5, max_skipped_steps=99)
    straight = kit.run_training(1, tmp_path / "straight", *flags)
    assert 0 < straight.kind("train")[-1]["skipped"] < 16  # it has shrunk, and some updates were made
    train_until_killed(13, 1, tmp_path / "run", *flags)
    shutil.copytree(tmp_path / "run", tmp_path / "mutant")
    run = kit.run_training(1, tmp_path / "run", *flags)
    assert kit.same(run.weights, straight.weights)
    assert kit.timeless(run.folder) == kit.timeless(straight.folder)
    states = [checkpoint_folder.read_state(at_step(one, 16)) for one in (run, straight)]
    assert states[0]["scaler"] == states[1]["scaler"]

    monkeypatch.setattr(torch.amp.GradScaler, "load_state_dict", lambda self, state: None)
    assert not kit.same(kit.run_training(1, tmp_path / "mutant", *flags).weights, straight.weights)


# ---- run folders -------------------------------------------------------------------------------------------------------


def test_finished_run_started_again(tiny, straight, tmp_path):
    """It changes nothing; with `--resume never` it archives the old run."""
    again = shutil.copytree(straight[1].folder, tmp_path / "again")
    kit.run_training(1, again, *recipe.flags(tiny))
    at_each_start = ("status.json", "environment.json", "uncommitted.diff", "config.yaml")
    before, after = (
        {name: text for name, text in recipe.contents(path).items() if name not in at_each_start}
        for path in (straight[1].folder, again)
    )
    assert before == after

    second = kit.run_training(1, again, *recipe.flags(tiny), "--resume", "never")
    assert recipe.same_run(second, straight[1])
    archived = sorted(path.name for path in again.glob("*.old1"))
    assert archived == ["checkpoints.old1", "final.old1", "ledger.jsonl.old1", "metrics.jsonl.old1"]
    lines = (again / "metrics.jsonl.old1").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == recipe.STEPS
