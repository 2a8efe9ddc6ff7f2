"""The calls by which techniques hang on train.py, and their order."""

import torch

import train
from src.training.techniques import Techniques
from tests.helpers import kit


class Spy(Techniques):
    """Notes each call, and evaluates twice."""

    def __init__(self):
        self.calls = []

    def change_model(self, model, cfg):
        self.calls.append("change_model")

    def begin(self, run):
        self.calls.append("begin")
        self.run = run
        return {}

    def compute_gradient(self, compute, backend, module, batch, total_weight):
        self.calls.append(f"compute_gradient of step {self.run.state.step}")
        return super().compute_gradient(compute, backend, module, batch, total_weight)

    def change_gradient(self):
        self.calls.append("change_gradient")
        self.norm = torch.stack([p.grad.norm() for p in self.run.parameters().values()]).norm()

    def after_update(self, skipped):
        self.calls.append("after_update")
        assert all(p.grad is None for p in self.run.parameters().values())
        assert torch.isclose(self.run.state.grad_norm, self.norm)  # clipped after `change_gradient`

    def evaluate(self, metrics, evaluate):
        self.calls.append("evaluate")
        return metrics | {"again/loss": evaluate()["loss"]}


def _spied(argv) -> list[str]:
    spy = Spy()
    train.make_techniques = lambda cfg: spy
    train.main([str(word) for word in argv])
    return spy.calls


def test_calls_of_a_run(tiny, tmp_path):
    values = {"global_batch_size": 8, "per_device_batch_size": 2, "max_steps": 2, "max_eval_examples": 4}
    [calls] = kit.spawn(1, _spied, kit.flags(**tiny, **values, output_dir=tmp_path / "run"), out=tmp_path / "out")
    step = ["compute_gradient of step {}", "change_gradient", "after_update"]
    steps = [call.format(number) for number in (1, 2) for call in step]
    assert calls == ["change_model", "begin", *steps, "evaluate"]
    line = kit.Run(tmp_path / "run").kind("eval")[-1]
    assert line["again/loss"] == line["loss"]
