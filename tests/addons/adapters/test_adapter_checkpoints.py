"""Checkpoints of an adapter: what is trained and nothing of the base model, resumed bitwise on the same one only."""

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from addons.adapters.peft import weight_hashes
from engine.storage import verify_hashes
from tests.helpers import fake_hub, kit, technique_runs

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.cluster  # needs an extra package

LORA = {"type": "lora", "r": 4, "target": ["c_attn", "c_fc"], "lora_alpha": 16}
SECOND = "checkpoints/step_00000002"


def fields(folder, **options) -> dict:
    return technique_runs.files(folder) | {"peft": json.dumps(LORA | options)}


def on_base(folder, base) -> dict:
    """Return the fields of a run on the model folder `base`, which is saved in float32."""
    values = fields(folder) | {"model_name_or_path": base}
    return {name: value for name, value in values.items() if name != "model_config"}


def bytes_of(folder) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def refusal(folder, values: dict, world: int = 1) -> str:
    """Return the last line of train.py in `folder`, which ends with exit code 2 on each process."""
    argv = [*kit.flags(**values), "--output_dir", "run", "--per_device_batch_size", "8"]
    codes, outputs = kit.run_command("train.py", *argv, folder=folder, world=world)
    assert codes == [2] * world, outputs
    return outputs[0].rstrip().splitlines()[-1]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    off = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    return kit.save_model(tmp_path_factory.mktemp("base") / "model", kit.TINY | off)


@pytest.fixture(scope="module")
def run(tmp_path_factory, base) -> kit.Run:
    """A run on two processes on a model folder, which resumes bitwise."""
    folder = tmp_path_factory.mktemp("run")
    return technique_runs.check_resume(folder, on_base(folder, base))


def test_checkpoint_weighs_adapter_and_moments(tmp_path):
    """All files of it, within 5 %, and the plan says the same of all folders. The base model is ten times larger."""
    values = fields(tmp_path, r=64) | {"max_steps": 2, "dtype": "float32", "save_total_limit": 1}
    wide = kit.TINY | {"n_embd": 256, "n_layer": 2, "vocab_size": 4000}
    values["model_config"] = kit.write_yaml(tmp_path / "wide.yaml", wide)
    run = technique_runs.train(tmp_path / "run", values)
    adapter = sum(value.nbytes for value in kit.load_weights(run.folder / SECOND, "adapter").values())
    assert sum(value.nbytes for value in run.weights.values()) > 5 * adapter
    assert bytes_of(run.folder / SECOND) == pytest.approx(3 * adapter, rel=0.05)
    codes, outputs = kit.run_command("train.py", *kit.flags(**values), "--dry_run", "true", folder=tmp_path / "dry")
    assert codes == [0]
    number, unit = re.search(r"disk +([\d.]+) (\w+) for checkpoints", outputs[0]).groups()
    peak = bytes_of(run.folder / SECOND) + bytes_of(run.folder / "final")  # the run saves once
    assert float(number) * {"MiB": 2**20, "GiB": 2**30}[unit] == pytest.approx(peak, rel=0.05)


def test_resumed_on_one_process_and_moved_base(run, base, tmp_path):
    """Two processes, then one, on a base model at another place: up to the order of sums."""
    moved = shutil.copytree(base, tmp_path / "moved")
    copy = kit.rewind(run.folder, 2, tmp_path / "copy")
    again = technique_runs.train(copy, on_base(tmp_path, moved), 1, 4)
    assert kit.distance(again.weights, run.weights) <= 1e-10
    assert verify_hashes.verify(again.folder / "checkpoints/step_00000004") == []


def test_resume_on_another_base_is_refused(run, base, tmp_path):
    """Before anything is written; the sentence names both. The old place of the base model does not help."""
    other = shutil.copytree(base, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["transformer.h.0.mlp.c_fc.bias"][0] += 1e-3
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    kit.rewind(run.folder, 2, tmp_path / "here/run")
    shutil.rmtree(tmp_path / "here/run/logs")
    before = sorted(str(path) for path in (tmp_path / "here").rglob("*"))
    line = refusal(tmp_path / "here", on_base(tmp_path, other), world=2)
    named, now = (weight_hashes.hash_of_weights(kit_config(tmp_path), folder) for folder in (base, other))
    assert all(part in line for part in (str(base), named, str(other), now))
    shutil.rmtree(tmp_path / "here/run/logs", ignore_errors=True)
    assert sorted(str(path) for path in (tmp_path / "here").rglob("*")) == before


def kit_config(folder):
    from engine.config.find_addons import run_config

    return run_config(cache_dir=str(folder / "cache"))


def test_evaluation_finds_the_base_or_names_it(run, base, tmp_path):
    last = run.kind("eval")[-1]
    found = kit.run_evaluation(2, tmp_path / "eval", "--checkpoint", run.folder / "checkpoints/step_00000005")
    assert found == last
    gone = base.rename(base.with_name("gone"))
    try:
        codes, outputs = kit.run_command(
            "eval.py", "--checkpoint", run.folder / SECOND, "--output_dir", "out", folder=tmp_path / "gone"
        )
    finally:
        gone.rename(base)
    assert codes == [2]
    assert str(base) in outputs[0].splitlines()[-1]


# ---- a Hub model ---------------------------------------------------------------------------------------------------------


def train_from_hub(environment: dict, argv: list, folder) -> None:
    fake_hub.adopt(environment)
    kit._command("train.py", argv, folder)


def test_hub_model_resumes_on_its_commit(tmp_path):
    """Although its branch has moved; adapter_config.json and the model card name that commit."""
    (tmp_path / "here").mkdir()
    with fake_hub.Hub(tmp_path / "hub") as hub:
        off = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
        environment = hub.environment(tmp_path / "home")
        kit.save_model(hub.folder / "models/org/model", kit.TINY | off)
        commit = hub.commit("models/org/model")
        values = on_base(tmp_path, "org/model") | {"per_device_batch_size": 16, "output_dir": "run"}
        values["cache_dir"] = tmp_path / "cache"
        for number in (1, 2):
            kit.spawn(
                1, train_from_hub, environment, kit.flags(**values), tmp_path / "here", out=tmp_path / f"out{number}"
            )
            run = tmp_path / "here/run"
            if number == 1:
                straight = kit.load_weights(run / "final")
                kit.rewind(run, 2)
                kit.save_model(hub.folder / "models/org/model", kit.TINY | off, seed=8)
                assert hub.commit("models/org/model") != commit
    assert kit.same(kit.load_weights(run / "final"), straight)
    config = json.loads((run / "final/adapter/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/model", commit)
    card = (run / "final/README.md").read_text()
    assert "base_model: org/model" in card
    assert f"commit {commit}" in card


# ---- sharded -------------------------------------------------------------------------------------------------------------


def test_checkpoint_of_fsdp2_resumes_on_one_process(run, base, tmp_path):
    env = kit.where("fsdp2", 2, mixed_precision="no")
    sharded = technique_runs.train(tmp_path / "run", on_base(tmp_path, base), 2, 4, env=env, units=1)
    adapters = sorted(path.name for path in (sharded.folder / SECOND).glob("*.safetensors"))
    assert not [name for name in adapters if name.startswith("model")]
    again = technique_runs.train(kit.rewind(sharded.folder, 2, tmp_path / "one"), on_base(tmp_path, base), 1, 4)
    assert kit.distance(again.weights, sharded.weights) <= 1e-10
