"""Adapters in the format of peft: final/ for AutoPeftModel, with and without the merged model; those of other programs."""

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml

from addons.adapters.peft import base_model
from engine.checkpointing.locate_weights import init_weights
from engine.config.errors import UsageError
from tests.helpers import kit, technique_runs

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.cluster  # needs an extra package

LORA = {"type": "lora", "r": 64, "target": ["q_proj", "o_proj"], "lora_alpha": 16}
IDS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return kit.save_model(tmp_path_factory.mktemp("base") / "model", kit.LLAMA | {"vocab_size": 50})


def fields(folder, base, **options) -> dict:
    values = technique_runs.files(folder) | {"dtype": "float32", "model_name_or_path": base}
    values["peft"] = json.dumps(LORA | options)
    return {name: value for name, value in values.items() if name != "model_config"}


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


def auto_peft(folder) -> torch.Tensor:
    return logits(peft.AutoPeftModelForCausalLM.from_pretrained(folder))


def auto_model(folder) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return logits(AutoModelForCausalLM.from_pretrained(folder))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, base) -> dict[bool, kit.Run]:
    """The same run with and without the merged model in final/."""
    folder = tmp_path_factory.mktemp("runs")
    merged = technique_runs.train(folder / "merged", fields(folder, base))
    values = fields(folder, base) | {"merge": False, "output_dir": folder / "alone", "per_device_batch_size": 16}
    codes, outputs = kit.run_command("train.py", *kit.flags(**values), folder=folder / "here")
    assert codes == [0], outputs
    return {True: merged, False: folder / "alone"}


def test_final_is_loaded_by_peft_and_transformers(runs, base):
    """The merged model, its adapter on the base model that it names, and an adapter alone: up to rounding in float32."""
    expected = auto_model(runs[True].folder / "final")
    alone = runs[False] / "final"
    assert (auto_model(base) - expected).abs().max() > 1e-3
    for found in (auto_peft(runs[True].folder / "final/adapter"), auto_peft(alone), auto_model(alone)):
        assert torch.allclose(found, expected, rtol=0, atol=1e-6)
    config = json.loads((alone / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["task_type"]) == (str(base), "CAUSAL_LM")
    # Servers load all of them as weights of the model.
    names = [path.name for path in (runs[True].folder / "final").glob("*.safetensors")]
    assert names == ["model.safetensors"]


def test_card_of_an_adapter_alone(runs, monkeypatch):
    alone = runs[False] / "final"
    card = (alone / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "peft"
    monkeypatch.chdir(alone)
    names: dict = {}
    exec(re.search("```python\n(.*)```", card, re.DOTALL)[1], names)
    assert torch.equal(logits(names["model"]), auto_peft(alone))


def test_final_without_merge_weighs_the_adapter(runs):
    adapter = kit.load_weights(runs[False] / "final", "adapter_model")
    weights = sum(path.stat().st_size for path in (runs[False] / "final").glob("*.safetensors"))
    assert weights == pytest.approx(sum(value.nbytes for value in adapter.values()), rel=0.05)
    assert not (runs[False] / "final/config.json").exists()


def test_finished_run_merges_later_without_training(runs, base, tmp_path):
    """It has begun with merge: false, and is started again with merge: true, twice, and with merge: false. The mutant: a
    final/ that stays whatever the run file says."""
    folder = shutil.copytree(runs[False], tmp_path / "alone")
    lines = (folder / "metrics.jsonl").read_text()
    expected = auto_model(runs[True].folder / "final")
    written = [(folder / "final").stat().st_ino]
    for number, merge in enumerate((True, True, False)):
        values = fields(tmp_path, base) | {"merge": merge, "output_dir": folder, "per_device_batch_size": 16}
        codes, outputs = kit.run_command("train.py", *kit.flags(**values), folder=tmp_path / f"again{number}")
        assert codes == [0], outputs
        assert (folder / "metrics.jsonl").read_text() == lines
        adapter = folder / "final/adapter" if merge else folder / "final"
        assert torch.allclose(auto_peft(adapter), expected, rtol=0, atol=1e-6)
        assert (folder / "final/config.json").exists() == merge
        if merge:
            assert torch.allclose(auto_model(folder / "final"), expected, rtol=0, atol=1e-6)
        written.append((folder / "final").stat().st_ino)
    assert [one == other for one, other in pairwise(written)] == [False, True, False]


def test_both_evaluate_to_the_digits_of_the_run(runs, tmp_path):
    expected = runs[True].kind("eval")[-1]
    for world, folder in ((1, runs[True].folder / "final"), (2, runs[False] / "final"), (1, runs[False])):
        assert kit.run_evaluation(world, tmp_path / f"eval{world}", "--checkpoint", folder) == expected


def test_an_adapter_alone_is_trained_further(runs, base, tmp_path):
    """By its own folder, and by a folder as other programs write it, which also names the base model."""
    first = runs[True].losses()[0]
    foreign = shutil.copytree(runs[True].folder / "final/adapter", tmp_path / "foreign")
    losses = []
    for number, folder in enumerate((runs[False] / "final", foreign, runs[True].folder / "final")):
        values = fields(tmp_path, base) | {"init_from": folder, "max_steps": 2}
        if folder == foreign:
            del values["model_name_or_path"]
        losses.append(technique_runs.train(tmp_path / str(number), values).losses())
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][0] < first


def test_a_second_stage_fits_the_base_that_its_card_names(runs, tmp_path):
    """A new adapter on the merged model of the first run, as preference optimization has after fine-tuning."""
    first = runs[True].folder / "final"
    second = technique_runs.train(tmp_path / "second", fields(tmp_path, first)).folder / "final"
    assert torch.allclose(auto_peft(second / "adapter"), auto_model(second), rtol=0, atol=1e-6)
    assert (auto_model(first) - auto_model(second)).abs().max() > 1e-3
    config = json.loads((second / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(first)
    assert (
        f"Its base model is final, weights {base_model.read_base(second).weights}" in (second / "README.md").read_text()
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"r": 2}, "r 64, but this field says 2"),
        ({"lora_alpha": 8}, "lora_alpha 16, but this field says 8"),
        ({"target": ["q_proj"]}, "o_proj.*this run has no such layer"),
        ({"target": ["q_proj", "o_proj", "v_proj"]}, "v_proj.*the adapter has no such layer"),
    ],
    ids=str,
)
def test_other_options_than_those_of_the_adapter_are_refused(runs, base, tmp_path, options, words):
    """One sentence with both values; of alpha, which no tensor shows, too."""
    foreign = shutil.copytree(runs[True].folder / "final/adapter", tmp_path / "foreign")
    task, _ = kit.open_data(**fields(tmp_path, base, **options), output_dir=tmp_path / "run", init_from=foreign)
    with pytest.raises(UsageError, match=f"(?s){words}"):
        task.build_model(str(foreign))


def test_adapter_of_another_base_is_refused(runs, base, tmp_path):
    other = kit.save_model(tmp_path / "other", kit.LLAMA | {"vocab_size": 50}, seed=8)
    for folder in (runs[False] / "final", runs[True].folder / "final/adapter"):
        values = fields(tmp_path, other) | {"init_from": folder, "output_dir": tmp_path / "run"}
        task, _ = kit.open_data(**values)
        with pytest.raises(UsageError, match=rf"{base}.*model_name_or_path is {other}"):
            task.build_model(str(init_weights(task.cfg, task)))


def test_adapter_of_a_base_in_few_bits_is_warned_of_on_the_original(runs, base, tmp_path, capsys):
    foreign = shutil.copytree(runs[True].folder / "final/adapter", tmp_path / "foreign")
    config = json.loads((foreign / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"someone/{base.name.title()}-unsloth-bnb-4bit"
    (foreign / "adapter_config.json").write_text(json.dumps(config))
    task, _ = kit.open_data(**fields(tmp_path, base) | {"init_from": foreign, "output_dir": tmp_path / "run"})
    assert init_weights(task.cfg, task) == foreign
    task.build_model(str(foreign))
    assert config["base_model_name_or_path"] in capsys.readouterr().err


def test_an_adapter_alone_is_no_model(runs, base, tmp_path):
    """As model_name_or_path, with a new adapter and without one."""
    alone = runs[False] / "final"
    for change in ({}, {"peft": "none"}):
        values = fields(tmp_path, alone) | change | {"output_dir": tmp_path / "run"}
        task, _ = kit.open_data(**values)
        with pytest.raises(UsageError, match=r"holds only what.*again with --merge true.*--init_from"):
            task.build_model()
