"""The field `techniques`: reading it, the order of techniques, resuming; the registry."""

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from addons.techniques import TECHNIQUES, Technique, sam, technique_class
from addons.techniques._chain import TechniqueChain, exchanged
from addons.techniques._options import options_of
from engine.config.errors import UsageError
from engine.config.find_addons import run_config
from tests.helpers import kit, technique_runs

REQUIRED = {"unfreeze": {"steps": {"*": 2}}}


# ---- reading the field -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, True, {}])
def test_null_and_true_take_all_defaults(given):
    ema = TechniqueChain(run_config(techniques={"ema": given})).techniques["ema"]
    assert vars(ema) == {"decay": 0.999, "warmup": False, "final": False}


@pytest.mark.parametrize(
    "given, words",
    [
        ({"emma": {}}, ["emma", "did you mean ema", "ema, "]),
        ({"ema": {"decai": 1}}, ["ema: decai", "did you mean decay", "decay, warmup, final"]),
        ({"ema": {"decay": "fast"}}, ["ema: decay", "'fast'", "share of the average"]),
        ({"ema": {"decay": [1, 2]}}, ["ema: decay", "1 2"]),
        ({"lawa": {"k": True}}, ["lawa: k: True"]),
        ({"lawa": {"k": 0, "every": "few"}}, ["lawa: k: 0", "every: 'few'"]),  # all at once
        ({"ema": {"decay": float("nan")}}, ["ema: decay: nan", "finite"]),
        ({"spike_watch": {"warmup": 9, "window": 8}}, ["spike_watch: warmup is 9", "window, which is 8"]),
        ({"ema": 0.5}, ["ema", "0.5", "{NAME: VALUE}"]),
        ({"ema": False}, ["ema: false", "remove the entry"]),
        ({"ema": {"decay": -1}, "lawa": {"l": 1}, "sma": None}, ["3 errors", "decay: -1", "l: unknown", "sma"]),
    ],
)
def test_invalid_techniques_are_refused_by_name(given, words):
    with pytest.raises(UsageError) as raised:
        TechniqueChain(run_config(techniques=given))
    for word in ("techniques: ", *words):
        assert word in str(raised.value)


def test_invalid_techniques_end_all_ranks_before_step_1(tmp_path):
    argv = kit.flags(**technique_runs.files(tmp_path), techniques="{clip_by_valu: null}", output_dir="run")
    codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / "here", world=2)
    assert codes == [2, 2]
    assert "techniques" in texts[0]
    assert texts[0].count("error") == 1
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize("names", [["sam", "asam"], ["gradient_norm_penalty", "sam"]])
def test_one_technique_moves_the_weights_for_a_second_gradient(names):
    with pytest.raises(UsageError, match=r"sam and .*: keep one"):
        TechniqueChain(run_config(techniques=dict.fromkeys(names)))


# ---- the order of techniques, and their states ---------------------------------------------------------------------------


def test_attribute_decides_the_order(monkeypatch):
    class Outer(Technique):
        """Computes the gradient twice."""

        def around_gradient(self, compute, batch, totals):
            return ["outer", compute(batch, totals), compute(batch, totals)]

    class Inner(Technique):
        order = 51

        def around_gradient(self, compute, batch, totals):
            return ["inner", compute(batch, totals)]

    for name, kind in (("outer", Outer), ("inner", Inner)):
        monkeypatch.setitem(TECHNIQUES, name, partial(dataclass(eq=False), kind))
    pass_of_inner = ["inner", ["s", "m", "w", 2.0]]
    for names in (["outer", "inner"], ["inner", "outer"]):
        chain = TechniqueChain(run_config(techniques=dict.fromkeys(names)))
        found = chain.wrap_gradient(lambda *args: [*args])("s", "m", "w", 2.0)
        assert found == ["outer", pass_of_inner, pass_of_inner]


def test_a_method_of_an_older_version_that_is_not_called_any_more_is_refused(monkeypatch):
    monkeypatch.setattr(sam.SAM, "compute_gradient", sam.SAM.around_gradient, raising=False)
    with pytest.raises(UsageError, match=r"sam: SAM has a method `compute_gradient`.* `around_gradient"):
        technique_class("sam")


def test_order_in_the_run_file_changes_no_bit(tmp_path):
    """And a run file in YAML, its config.yaml and JSON on the command line are the same run."""
    techniques = {"clip_by_value": {"limit": 1e-3}, "gradient_noise": {"eta": 1e-8}}
    values = technique_runs.files(tmp_path)
    first = technique_runs.train(tmp_path / "flag", values, max_steps=2, techniques=json.dumps(techniques))
    turned = dict(reversed(techniques.items()))
    texts = {name: str(value) if hasattr(value, "parts") else value for name, value in values.items()}
    file = kit.write_yaml(tmp_path / "run.yaml", texts | {"techniques": turned, "max_steps": 2})
    second = kit.run_training(1, tmp_path / "yaml", "--config", file, "--per_device_batch_size", technique_runs.ROWS)
    third = kit.run_training(1, tmp_path / "config", "--config", first.folder / "config.yaml")
    plain = technique_runs.train(tmp_path / "plain", values, max_steps=2)
    assert kit.same(first.weights, second.weights)
    assert kit.same(first.weights, third.weights)
    assert not kit.same(first.weights, plain.weights)


@pytest.mark.cluster
def test_real_deepspeed_is_refused_on_all_ranks(tmp_path):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install -r requirements-extra.txt")
    values = technique_runs.files(tmp_path) | {"dtype": "float32", "per_device_batch_size": 4, "output_dir": "run"}
    argv = kit.flags(**values, techniques='{"clip_by_value": null}')
    env = kit.where("zero2", 2, mixed_precision="no")
    codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / "here", world=2, env=env, timeout=300)
    assert codes == [2, 2]
    assert "techniques: clip_by_value does not support DeepSpeed" in "".join(texts)


# ---- weights in place of others ------------------------------------------------------------------------------------------


def test_exchanged_weights_are_bitwise_restored():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    odd = torch.tensor([[float("nan"), -0.0], [1e-45, float("inf")]])
    with torch.no_grad():
        model[0].weight.copy_(odd)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    others = {"0.weight": torch.ones(2, 2), "1.running_mean": torch.full((2,), 3.0)}
    with suppress(RuntimeError), exchanged(model, others):
        assert torch.equal(model[0].weight, torch.ones(2, 2))
        assert torch.equal(model[1].running_mean, torch.full((2,), 3.0))
        raise RuntimeError("an evaluation fails")
    for name, value in model.state_dict().items():
        assert value.numpy().tobytes() == before[name].numpy().tobytes(), name


# ---- the registry --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TECHNIQUES)
def test_recorded_defaults_are_read_again(name):
    cfg = run_config(techniques={name: options_of(TECHNIQUES[name]()()) | REQUIRED.get(name, {})})
    [each] = cfg.addons
    recorded = json.loads(json.dumps(each.complete(cfg)))
    assert each.complete(run_config(**recorded)) == recorded
