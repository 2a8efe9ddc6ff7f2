"""Whether a checkpoint is of the same run, if techniques differ."""

from dataclasses import replace

import pytest
import yaml

from addons.techniques import TECHNIQUES, NamedTechniques
from engine.config.find_addons import run_config
from engine.config.parsing import to_yaml
from engine.config.run_config import RunConfig, field_values
from engine.find_tasks import OPTIONS
from tests.engine.checkpointing.test_run_identity import check, refusal

EMA_CLASS = TECHNIQUES["ema"]()


def with_techniques(techniques: dict | None) -> RunConfig:
    """Return a run's fields as train.py has them once it has read the techniques."""
    cfg = run_config(output_dir="run", max_steps=12, techniques=techniques)
    return run_config(**field_values(cfg) | NamedTechniques(techniques).complete(cfg))


EMA = {"ema": {"decay": 0.999}}
STATISTICS = {"gradient_statistics": {"values": ["weight_norm"]}}


def test_techniques_are_recorded_with_all_options_in_the_order_of_the_registry():
    cfg = with_techniques({"clip_by_value": {"limit": "2"}, "sam": None, "gradient_statistics": {"groups": None}})
    recorded = yaml.safe_load(to_yaml(cfg, OPTIONS[cfg.task]()()))["techniques"]
    statistics = {"values": ["grad_norm"], "groups": None}
    expected = {"gradient_statistics": statistics, "sam": {"rho": 0.05}, "clip_by_value": {"limit": 2.0}}
    assert list(recorded.items()) == list(expected.items())
    assert field_values(with_techniques(recorded))["techniques"] == recorded  # config.yaml is a run file


@pytest.mark.parametrize(
    "was, now",
    [
        ({"ema": {"decay": "0.999", "final": "no"}}, EMA),
        (EMA | {"sam": None}, {"sam": {"rho": 5e-2}} | EMA),
    ],
)
def test_the_same_techniques_in_other_words_are_the_same_run(tmp_path, was, now):
    assert check(tmp_path, with_techniques(now), was=with_techniques(was)) == []


@pytest.mark.parametrize(
    "was, now, text",
    [
        (
            EMA,
            {"ema": {"decay": 0.99, "final": True}},
            "(techniques.ema: {'decay': 0.999, 'warmup': False, 'final': False} → {'decay': 0.99, 'warmup': False, 'fin",
        ),
        (None, EMA | STATISTICS, "(techniques.ema: None → {'decay': 0.999, 'warmup': False, 'final': False})"),
        (
            {"unfreeze": {"steps": {"*.h.*": 5, "*": 9}}},
            {"unfreeze": {"steps": {"*": 9, "*.h.*": 5}}},  # the first pattern that matches decides
            "(techniques.unfreeze: {'steps': [('*.h.*', 5), ('*', 9)]} → {'steps': [('*', 9), ('*.h.*', 5)]})",
        ),
    ],
)
def test_another_technique_or_option_is_refused_by_name(tmp_path, was, now, text):
    assert text in refusal(tmp_path, with_techniques(now), was=with_techniques(was))


def test_a_changed_default_is_refused(tmp_path, monkeypatch):
    was = with_techniques({"ema": None})
    monkeypatch.setattr(EMA_CLASS.__init__, "__defaults__", (0.99, *EMA_CLASS.__init__.__defaults__[1:]))
    assert "(techniques.ema: {'decay': 0.999, " in refusal(tmp_path, with_techniques({"ema": None}), was=was)


@pytest.mark.parametrize(
    "was, now, text",
    [
        (EMA, EMA | STATISTICS, "None → {'values': ['weight_norm']"),
        (EMA | STATISTICS, EMA, "{'values': ['weight_norm'], 'groups': None} → None"),
        ({"gradient_statistics": None}, STATISTICS, "{'values': ['grad_norm'], 'groups': None} → {'values': ['weight"),
    ],
)
def test_a_technique_that_changes_no_number_may_change(tmp_path, was, now, text):
    [remark] = check(tmp_path, with_techniques(now), was=with_techniques(was))
    assert f"changed since step_00000008: techniques.gradient_statistics: {text}" in remark


def test_technique_that_depends_on_the_length_of_a_run_is_not_extended(tmp_path):
    """A constant rate would allow another `max_steps`."""
    longer = {"max_steps": 20, "lr_scheduler_type": "constant"}
    was = with_techniques({"progressive_resizing": None})
    was = replace(was, lr_scheduler_type="constant")
    assert "techniques.progressive_resizing" in refusal(tmp_path, replace(was, **longer), was=was)
    plain = replace(was, addons=())
    assert "max_steps" in check(tmp_path, replace(plain, **longer), was=plain)[0]


def test_technique_of_a_checkpoint_that_is_not_here_any_more():
    values = {"techniques": {"gone": {"rate": 1}}, "max_steps": 4, "num_train_epochs": None}
    assert NamedTechniques.identity(values)["techniques.gone"] == {"rate": 1}
