"""Plain torch modules: trained, saved, resumed and evaluated without a field or method of transformers."""

import types

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from engine.config.errors import UsageError
from engine.config.run_config import RunConfig
from engine.models.build_model import build_plain_model
from tests.helpers import kit, plain_task
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


def test_killed_run_with_a_frozen_part_resumes_bitwise_and_eval_finds_its_numbers(plain, tmp_path):
    """Killed after step 16; final/ and every checkpoint hold the saved part only."""
    argv = flags(plain, teacher=True)
    straight = kit.run_training(1, tmp_path / "straight", *argv)
    run = kit.run_training(1, kit.rewind(straight.folder, 16, tmp_path / "run"), *argv)
    assert kit.same(run.weights, straight.weights)
    assert kit.timeless(run.folder) == kit.timeless(straight.folder)
    assert run.weights.keys() == Net().state_dict().keys()
    assert kit.run_evaluation(2, tmp_path / "eval", "--checkpoint", run.folder) == straight.kind("eval")[-1]


def test_final_is_evaluated_by_its_name(one, plain, tmp_path):
    data = kit.flags(task="plain", validation_file=plain["validation_file"], dtype="float64")
    line = kit.run_evaluation(1, tmp_path / "eval", "--model_name_or_path", one.folder / "final", *data)
    assert {**line, "step": 24} == one.kind("eval")[-1]


# ---- weights of a folder ---------------------------------------------------------------------------------------------


def build(folder, dtype="float32", **options) -> torch.nn.Module:
    return build_plain_model(RunConfig(model_name_or_path=str(folder), dtype=dtype), lambda: Net(**options))


def test_weights_that_do_not_fit_are_refused(tmp_path):
    state = Net().state_dict()
    del state["enter.bias"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"enter\.bias"):
        build(tmp_path)


# ---- unusual parameters ----------------------------------------------------------------------------------------------


class Unusual(nn.Module):
    """Parametrizations, tied and transposed weights, a stateless module that is used twice, buffers of odd types."""

    def __init__(self):
        super().__init__()
        self.shape = (plain_task.LABELS, plain_task.CLASSES)
        self.enter, self.leave = nn.Linear(plain_task.FEATURES, 8), nn.Linear(8, self.shape[0] * self.shape[1])
        self.one, self.two, self.tanh = nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh()
        self.two.weight = self.one.weight
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.transposed = nn.Parameter(torch.randn(8, 8).t())
        self.wide = nn.Parameter(torch.ones(8, dtype=torch.float64))
        self.index = nn.Parameter(torch.arange(8), requires_grad=False)
        self.register_buffer("angles", torch.polar(torch.ones(8), torch.arange(8.0)))
        self.register_buffer("mask", torch.arange(8) > 2)

    def forward(self, x):
        x = self.tanh(self.two(self.tanh(self.one(self.tanh(self.enter(x))))))
        x = self.spectral(self.norm(x)) @ self.transposed * self.wide.to(x.dtype)
        return self.leave(x).unflatten(-1, self.shape)


class Task(plain_task.Task):
    def build(self, weights=None, empty=False):
        return build_plain_model(self.cfg, Unusual, weights, empty)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.cluster)])
def test_unusual_module_trains_resumes_and_evaluates(plain, tmp_path, world):
    argv = flags(plain, task="unusual", lr_scheduler_type="constant", eval_steps=4, save_steps=2, max_steps=4)
    env = kit.where("fsdp2", 2, mixed_precision="no") if world == 2 else None
    with plain_task.registered(types.SimpleNamespace(Task=Task, Options=plain_task.Options), "unusual"):
        one = kit.run_training(1, tmp_path / "one", *argv)
        resumed = kit.run_training(world, kit.rewind(one.folder, 2, tmp_path / "resumed"), *argv, env=env, units=1)
        line = kit.run_evaluation(1, tmp_path / "eval", "--checkpoint", one.folder)
    torch.testing.assert_close(dict(resumed.weights), dict(one.weights), rtol=0, atol=1e-10 if env else 0)
    assert line == one.kind("eval")[-1]
