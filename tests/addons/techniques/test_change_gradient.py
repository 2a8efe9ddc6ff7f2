"""What techniques see as the gradient: unscaled in fp16; and that none makes a non-finite gradient look finite."""

import json
from itertools import product
from typing import Any

import pytest
import torch

from addons.techniques import TECHNIQUES, _chain
from engine.config.run_config import RunConfig
from engine.run.train_state import Run, TrainState
from tests.helpers import kit
from tests.helpers.fp16 import train_in_fp16
from tests.helpers.step_recipe import recipe


@pytest.fixture(scope="module")
def flags(files):
    techniques = {"adaptive_clipping": {"clip_factor": 0.05}, "clip_by_value": {"limit": 1e-3}}
    few = {"global_batch_size": 8, "per_device_batch_size": 4, "warmup_steps": 0, "max_steps": 6, "max_length": 16}
    return recipe(files, dtype="float32", **few, techniques=json.dumps(techniques))


def norms(folder) -> list[float]:
    return [line["grad_norm"] for line in kit.Run(folder).kind("train")]


def test_techniques_see_the_unscaled_gradient_in_fp16(flags, tmp_path, monkeypatch):
    kit.run_training(1, tmp_path / "fp32", *flags)
    folder = ["--output_dir", tmp_path / "fp16"]
    kit.spawn(1, train_in_fp16, [*flags, *folder], 2.0**10, out=tmp_path / "out")
    assert norms(tmp_path / "fp16") == pytest.approx(norms(tmp_path / "fp32"), rel=0.03)
    # The mutant clips the gradient times 1024.
    monkeypatch.setattr(_chain.TechniqueChain, "change_gradient", _without_unscaling)
    kit.spawn(1, train_in_fp16, [*flags, *folder, "--resume", "never"], 2.0**10, out=tmp_path / "mutant")
    assert norms(tmp_path / "fp16") != pytest.approx(norms(tmp_path / "fp32"), rel=0.5)


def _without_unscaling(chain) -> None:
    for technique in chain.techniques.values():
        technique.change_gradient()


CHANGING = ("gradient_noise", "adaptive_clipping", "clip_by_value")
VALUES = [
    *product(CHANGING, (float("inf"), float("nan"))),
    ("adaptive_clipping", 1e30),
]  # only its square is not finite


@pytest.mark.parametrize("name, value", VALUES)
def test_a_non_finite_gradient_stays_non_finite(name, value):
    model = torch.nn.Linear(2, 3, bias=False)
    model.weight.grad = torch.tensor([[1.0, 2.0], [value, 0.0], [0.0, 0.0]])
    technique = TECHNIQUES[name]()()
    unused: Any = None
    technique.run = Run(RunConfig(), unused, unused, {}, model, model, unused, 1, TrainState(step=1))
    technique.check()
    technique.begin()
    technique.change_gradient()
    assert model.weight.grad[[0, 2]].isfinite().all()
    assert not model.weight.grad[1].isfinite().all()
