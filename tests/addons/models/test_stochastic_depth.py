"""Stochastic depth: the field of each kind of model, the same draws on any number of processes, refusals."""

from types import SimpleNamespace

import pytest
import torch

from engine.config import parsing
from engine.config.errors import UsageError
from engine.find_tasks import OPTIONS
from engine.models.config_and_tokenizer import load_config
from tests.addons.tasks.images import CONVNEXT, run_fields
from tests.helpers import kit


def test_layers_are_dropped_alike_on_any_number_of_processes(tmp_path):
    more = {"model_config": kit.write_yaml(tmp_path / "deep.yaml", CONVNEXT | {"depths": [2, 2]})}
    values = run_fields(tmp_path, **more, per_device_batch_size=4)
    none, one, two = (
        kit.run_training(world, tmp_path / str(i), *kit.flags(**values, **({"stochastic_depth": 0.4} if i else {})))
        for i, world in enumerate((1, 1, 2))
    )
    assert kit.distance(one.weights, two.weights) <= 1e-10
    assert kit.distance(one.weights, none.weights) > 1e-4


def test_fields_of_the_model_and_a_model_without_one(tmp_path):
    def load(config, **fields):
        flags = kit.flags(model_config=kit.write_yaml(tmp_path / "model.yaml", config), **fields)
        return load_config(parsing.parse(flags, OPTIONS)[0], None)

    assert load(CONVNEXT, stochastic_depth=0.25).drop_path_rate == 0.25
    with pytest.raises(UsageError, match=r"stochastic_depth is 0.25.*gpt2.*drop_path_rate"):
        load(kit.TINY, stochastic_depth=0.25)
    cfg = parsing.parse(kit.flags(stochastic_depth=0.5), OPTIONS)[0]
    with pytest.raises(UsageError, match=r"stochastic_depth is 0.5, but Linear is not a model of transformers"):
        [addon] = cfg.addons
        addon.change_built_model(SimpleNamespace(cfg=cfg), torch.nn.Linear(2, 2), None, False)
