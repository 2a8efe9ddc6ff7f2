"""Identity of a base model: equal weights have one hash, others another; it is read once; the commit of a run is kept."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from addons.adapters.peft import base_model, weight_hashes
from addons.adapters.peft.base_model import BaseModel
from engine.config.errors import UsageError
from engine.config.find_addons import run_config
from engine.storage import hub
from tests.helpers import kit


@pytest.fixture
def cfg(tmp_path):
    return run_config(cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    return kit.save_model(tmp_path / "base", kit.TINY)


def test_hash_does_not_depend_on_the_files(cfg, folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    other = tmp_path / "other"
    other.mkdir()
    for number, part in enumerate((names[:4], names[4:]), start=1):
        named = {name: tensors[name] for name in part}
        save_file(named, other / f"model-{number:05d}-of-00002.safetensors", {"a": "b"})
    assert weight_hashes.hash_of_weights(cfg, other) == weight_hashes.hash_of_weights(cfg, folder)


@pytest.mark.parametrize("change", ["bit", "dtype", "name", "shape"])
def test_any_other_weight_has_another_hash(cfg, folder, change):
    before = weight_hashes.hash_of_weights(cfg, folder)
    tensors = load_file(folder / "model.safetensors")
    name = sorted(tensors)[-1]
    if change == "bit":
        tensors[name].view(torch.int32).view(-1)[3] ^= 1
    elif change == "dtype":
        tensors[name] = tensors[name].view(torch.int32)
    elif change == "name":
        tensors["another"] = tensors.pop(name)
    else:
        tensors[name] = tensors[name].reshape(1, -1)
    save_file(tensors, folder / "model.safetensors")
    assert weight_hashes.hash_of_weights(cfg, folder) != before


def test_weights_are_read_once(cfg, folder, monkeypatch):
    """Also by another process, until a file changes."""
    first = weight_hashes.hash_of_weights(cfg, folder)
    reads = []
    monkeypatch.setattr(weight_hashes, "_read_hash", lambda files: reads.append(files) or "other")
    assert weight_hashes.hash_of_weights(cfg, folder) == first
    assert not reads
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")
    assert weight_hashes.hash_of_weights(cfg, folder) == "other"


def test_file_that_ends_early_is_damaged(cfg, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UsageError, match="damaged"):
        weight_hashes.hash_of_weights(cfg, folder)


def test_hub_model_keeps_the_commit_of_its_run(cfg, folder, tmp_path, monkeypatch):
    """Although its branch has moved. The mutant: the fields of the run, which name the newer commit."""
    newer = {"commit": "b" * 40, "folder": str(folder)}
    monkeypatch.setattr(hub, "records", {"model some/base@main": newer})
    cfg = dataclasses.replace(cfg, model_name_or_path="some/base")
    monkeypatch.setattr(base_model, "pretrained_source", lambda cfg: (folder, newer["commit"]))
    assert base_model.find_base(cfg, None) == BaseModel("some/base", "b" * 40)
    found = base_model.fields_of_base(cfg, BaseModel("some/base", "a" * 40), tmp_path)
    assert (found.model_name_or_path, found.model_revision) == ("some/base", "a" * 40)
    assert not BaseModel("some/base", "a" * 40).is_same(base_model.find_base(cfg, None))


def test_base_is_found_at_its_new_place(cfg, folder, tmp_path):
    base = base_model.find_base(dataclasses.replace(cfg, model_name_or_path=str(folder)), None)
    moved = folder.rename(tmp_path / "moved")
    found = base_model.fields_of_base(dataclasses.replace(cfg, model_name_or_path=str(moved)), base, tmp_path / "run")
    assert found.model_name_or_path == str(moved)
    with pytest.raises(UsageError, match=base.weights):
        base_model.fields_of_base(cfg, base, tmp_path / "run")


def test_random_weights_that_are_drawn_otherwise_are_refused():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    base = base_model.check_random(BaseModel(seed=0, dtype="float32"), model, None)
    assert base_model.check_random(base, model, "there") == base
    with pytest.raises(UsageError, match="install the versions"):
        base_model.check_random(base, torch.nn.Linear(3, 3), "there")
