"""The package pytorch_optimizer: its names, the groups of Muon's relatives, resumed runs; a missing package."""

import sys
from types import ModuleType

import pytest
import torch

from engine.config.errors import UsageError
from engine.config.optimizer_class import find_optimizer
from engine.config.run_config import RunConfig
from engine.run.memory import optimizer_moments
from src.training.optimizers import make_optimizer
from tests.helpers import kit, technique_runs

pytestmark = pytest.mark.cluster  # with the other extra packages


@pytest.fixture
def package() -> ModuleType:
    return pytest.importorskip("pytorch_optimizer")


def test_names_of_the_package_are_found(package):
    """A name that torch has, too, is torch's, unless the file is named."""
    assert find_optimizer("lion")[0] is package.Lion
    assert find_optimizer("pytorch_optimizer/nadam")[0] is package.NAdam
    assert find_optimizer("nadam") == (torch.optim.NAdam, None)
    assert [optimizer_moments(RunConfig(optim=name)) for name in ("lion", "pytorch_optimizer/lion")] == [1, 1]


def test_optimizer_that_evaluates_other_weights_is_refused(package):
    with pytest.raises(UsageError, match="use adamw or sgd, and a technique that averages weights"):
        find_optimizer("schedulefree_adamw")


def test_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(UsageError, match=r"optim is soap: .*\.venv/bin/pip install pytorch_optimizer==\d"):
        find_optimizer("soap")
    assert find_optimizer("adagrad") == (torch.optim.Adagrad, None)


@pytest.mark.parametrize("optim, bar", [("lion", 0.0), ("adamuon", 0.0), ("soap", 1e-10)])
def test_run_is_resumed(tmp_path, package, optim, bar):
    """soap has lists of matrices in its state, by columns in memory; a checkpoint holds them by rows, which rounds
    otherwise."""
    if optim == "adamuon":
        kit.need_addon("optimizers/muon")
    values = technique_runs.files(tmp_path) | {"optim": optim}
    technique_runs.check_resume(tmp_path, values, world=1, micro=16, bar=bar)


def test_relatives_of_muon_get_the_matrices_of_hidden_layers(tmp_path, package):
    kit.need_addon("optimizers/muon")
    values = technique_runs.files(tmp_path)
    task, _ = kit.open_data(model_config=values["model_config"], train_file=values["train_file"])
    optimizer = make_optimizer(RunConfig(optim="adamuon"), task.build())
    groups = {group["use_muon"]: group["params"] for group in optimizer.param_groups if group["weight_decay"]}
    shapes = {flag: {tuple(p.shape) for p in parameters} for flag, parameters in groups.items()}
    assert (16, 64) in shapes[True]
    assert (16, 64) not in shapes[False]
