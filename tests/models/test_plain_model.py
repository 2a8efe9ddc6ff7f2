"""Plain torch modules: trained, saved, resumed and evaluated without a field or method of transformers."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from src.config.errors import UsageError
from src.config.parsing import RunConfig
from src.models.build_model import build_plain_model, saved_config
from tests.helpers import kit
from tests.helpers.plain_task import Net, flags


@pytest.fixture(scope="module")
def one(plain, tmp_path_factory) -> kit.Run:
    return kit.run_training(1, tmp_path_factory.mktemp("plain") / "one", *flags(plain))


@pytest.mark.parametrize("world", [2, 4])
def test_training_does_not_depend_on_the_split(plain, one, tmp_path, world):
    run = kit.run_training(world, tmp_path / "run", *flags(plain))
    assert kit.distance(one.weights, run.weights) <= 1e-10
    assert run.losses() == pytest.approx(one.losses(), rel=1e-10)
    assert run.losses()[-1] < run.losses()[0]
    assert run.kind("eval")[-1] == pytest.approx(one.kind("eval")[-1])


@pytest.mark.parametrize("fields", [{}, {"teacher": True}], ids=str)
def test_killed_run_resumes_bitwise_and_eval_finds_its_numbers(plain, one, tmp_path, fields):
    """Killed on two processes after step 16, resumed on one; final/ and every checkpoint hold the saved part only."""
    straight = one if not fields else kit.run_training(1, tmp_path / "straight", *flags(plain, **fields))
    folder = shutil.copytree(straight.folder, tmp_path / "run")
    shutil.rmtree(folder / "final")
    shutil.rmtree(folder / "checkpoints" / "step_00000024")
    run = kit.run_training(1, folder, *flags(plain, **fields))
    assert kit.same(run.weights, straight.weights)
    assert kit.timeless(folder) == kit.timeless(straight.folder)
    assert run.weights.keys() == Net().state_dict().keys()
    line = kit.run_evaluation(2, tmp_path / "eval", "--checkpoint", folder)
    assert line == straight.kind("eval")[-1]


def test_final_says_what_it_is(one, plain, tmp_path):
    final = one.folder / "final"
    assert {path.name for path in final.iterdir()} == {
        "README.md",
        "config.json",
        "manifest.json",
        "model.safetensors",
        "run_config.yaml",
    }
    config = json.loads((final / "config.json").read_text())
    assert (config["task"], config["architectures"], config["net"]["width"]) == ("plain", ["Net"], 16)
    card = (final / "README.md").read_text()
    assert "library_name" not in card
    data = kit.flags(task="plain", validation_file=plain["validation_file"], dtype="float64")
    line = kit.run_evaluation(1, tmp_path / "eval", "--model_name_or_path", final, *data)
    assert {**line, "step": 24} == one.kind("eval")[-1]


def build(folder, dtype="float32", **options) -> torch.nn.Module:
    return build_plain_model(RunConfig(model_name_or_path=str(folder), dtype=dtype), lambda: Net(**options))


def test_weights_that_do_not_fit_are_named_in_one_error(tmp_path):
    state = Net(width=16).state_dict()
    del state["enter.bias"], state["shift"]
    save_file(state | {"else": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError) as raised:
        build(tmp_path, width=4)
    for part in (
        'Missing key(s) in state_dict: "shift", "enter.bias"',
        'Unexpected key(s) in state_dict: "else"',
        "size mismatch",
    ):
        assert part in str(raised.value)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="Missing key"):
        build(tmp_path)


def test_tied_weights_load_from_one_name_or_all(tmp_path):
    """The files may come from a library that writes tied weights once."""
    model = Net(tied=True)
    for names in (["blocks.0.linear.weight"], ["blocks.3.linear.weight"], []):
        kept = {name: value.clone() for name, value in model.state_dict().items() if name not in names}
        save_file(kept, tmp_path / "model.safetensors")
        loaded = build(tmp_path, "float64", tied=True)
        assert loaded.blocks[0].linear.weight is loaded.blocks[3].linear.weight
        assert all(torch.equal(value.double(), loaded.state_dict()[name]) for name, value in model.state_dict().items())


def test_config_of_another_task_or_damaged_is_refused(tmp_path):
    cfg = RunConfig(task="plain", model_name_or_path=str(tmp_path))
    assert saved_config(cfg) == saved_config(RunConfig()) == {}
    for text, part in (('{"task": "causal_lm"}', "belongs to task causal_lm"), ("{", "not readable as JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError, match=part):
            saved_config(cfg)
