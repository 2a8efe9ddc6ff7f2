"""Plain modules with unusual parameters: each trains, resumes bitwise and evaluates, or is refused by name."""

import json
import shutil
import types
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from src.config.fields import option
from src.models.build_model import build_plain_model
from tests.helpers import kit, plain_task


class Net(nn.Module):
    """Two linear layers, and between them what a test adds."""

    def __init__(self, add):
        super().__init__()
        self.enter, self.leave = nn.Linear(plain_task.FEATURES, 8), nn.Linear(8, plain_task.LABELS * plain_task.CLASSES)
        self.between = add(self) or nn.Identity()

    def forward(self, x):
        return self.leave(self.between(torch.tanh(self.enter(x)))).unflatten(
            -1, (plain_task.LABELS, plain_task.CLASSES)
        )


class Scale(nn.Module):
    """Multiplies by a parameter."""

    def __init__(self, scale):
        super().__init__()
        self.scale = nn.Parameter(scale)

    def forward(self, x):
        return (x @ self.scale if self.scale.dim() == 2 else x * self.scale).to(x.dtype).contiguous()


class Lstm(nn.LSTM):
    def forward(self, x):
        return super().forward(x[..., None])[0][:, -1]


class Extra(nn.Identity):
    def get_extra_state(self):
        return {"count": 1}

    def set_extra_state(self, state):
        pass


def tied(net):
    tanh = nn.Tanh()  # called twice, as some models reuse a module without parameters
    layers = nn.Sequential(nn.Linear(8, 8), tanh, nn.Linear(8, 8), tanh)
    layers[2].weight = layers[0].weight
    return layers


def buffers(net):
    net.register_buffer("angles", torch.polar(torch.ones(8), torch.arange(8.0)))
    net.register_buffer("mask", torch.arange(8) > 2)
    net.index = nn.Parameter(torch.arange(8), requires_grad=False)


NETS = {
    "tied": tied,
    "buffers": buffers,
    "norm": lambda net: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "spectral": lambda net: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "transposed": lambda net: Scale(torch.randn(8, 8).t()),
    "lstm": lambda net: Lstm(1, 8, batch_first=True),
    "double": lambda net: Scale(torch.ones(8, dtype=torch.float64)),
    "extra": lambda net: Extra(),
}
WORK = ("tied", "buffers", "norm", "spectral", "transposed", "lstm", "double")


@dataclass
class Options(plain_task.Options):
    net: str = option("a key of NETS", "tied", from_checkpoint=True)


class Task(plain_task.Task):
    def build(self, weights=None, empty=False):
        return build_plain_model(self.cfg, lambda: Net(NETS[self.options.net]), weights, empty)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    with plain_task.registered(types.SimpleNamespace(Task=Task, Options=Options), "any_module"):
        yield plain_task.write_data(tmp_path_factory.mktemp("any"))


def flags(data, net, **fields):
    fields = {"lr_scheduler_type": "constant", "dtype": "float32"} | fields
    return plain_task.flags(data, task="any_module", net=net, eval_steps=4, save_steps=2, **fields)


def _run_all(argvs):
    """Run commands, each in a folder of its own, in this process."""
    from accelerate.state import AcceleratorState

    import eval as evaluation
    import train

    for script, *argv in argvs:
        AcceleratorState._reset_state(reset_partial_state=True)
        (train if script == "train" else evaluation).main([str(word) for word in argv])


def test_unusual_modules_train_resume_and_evaluate(data, tmp_path):
    runs = [("train", *flags(data, net, max_steps=4), "--output_dir", tmp_path / net) for net in WORK]
    kit.spawn(1, _run_all, runs, out=tmp_path / "out", timeout=300)
    again = []
    for net in WORK:
        folder = shutil.copytree(tmp_path / net, tmp_path / f"{net}-resumed")
        shutil.rmtree(folder / "final")
        shutil.rmtree(folder / "checkpoints" / "step_00000004")
        again.append(("train", *flags(data, net, max_steps=4), "--output_dir", folder))
        again.append(("eval", "--checkpoint", tmp_path / net, "--output_dir", tmp_path / f"{net}-evaluated"))
    kit.spawn(1, _run_all, again, out=tmp_path / "again", timeout=300)
    for net in WORK:
        run, resumed = kit.Run(tmp_path / net), kit.Run(tmp_path / f"{net}-resumed")
        assert kit.same(run.weights, resumed.weights), net
        assert json.loads((tmp_path / f"{net}-evaluated" / "eval.json").read_text()) == run.kind("eval")[-1], net


@pytest.mark.cluster
@pytest.mark.parametrize("net", ["tied", "transposed"])
def test_unusual_modules_are_sharded(data, tmp_path, net):
    argv = flags(data, net, max_steps=4, dtype="float64")
    env = kit.where("fsdp2", 2, mixed_precision="no")
    codes, texts = kit.run_command("train.py", *argv, "--output_dir", "run", folder=tmp_path / "two", world=2, env=env)
    assert codes == [0, 0], texts
    one = kit.run_training(1, tmp_path / "one", *argv)
    assert kit.distance(one.weights, kit.load_weights(tmp_path / "two" / "run" / "final")) <= 1e-10


def test_extra_state_is_refused(data, tmp_path):
    argv = flags(data, "extra", max_steps=1, output_dir="run")
    codes, [text] = kit.run_command("train.py", *argv, folder=tmp_path / "here")
    assert codes == [2], text
    assert "extra_state" in text.splitlines()[-1], text


@pytest.mark.cluster
def test_state_that_cannot_be_sharded_is_refused(data, tmp_path):
    env = kit.where("fsdp2", 2, mixed_precision="no")
    argv = flags(data, "extra", max_steps=1, output_dir="run")
    codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / "here", world=2, env=env)
    assert codes == [2, 2], texts
    assert "extra_state" in texts[0], texts
