"""Plain torch modules: trained, saved, resumed and evaluated without a field or method of transformers."""

import json
import shutil
import types
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from src.config.errors import UsageError
from src.config.fields import option
from src.config.schema import RunConfig
from src.models.build_model import build_plain_model, saved_config
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


@pytest.mark.parametrize("fields", [{}, {"teacher": True}], ids=str)
def test_killed_run_resumes_bitwise_and_eval_finds_its_numbers(plain, one, tmp_path, fields):
    """Killed after step 16; final/ and every checkpoint hold the saved part only."""
    straight = one if not fields else kit.run_training(1, tmp_path / "straight", *flags(plain, **fields))
    folder = shutil.copytree(straight.folder, tmp_path / "run")
    shutil.rmtree(folder / "final")
    shutil.rmtree(folder / "checkpoints" / "step_00000024")
    run = kit.run_training(1, folder, *flags(plain, **fields))
    assert kit.same(run.weights, straight.weights)
    assert kit.timeless(folder) == kit.timeless(straight.folder)
    assert run.weights.keys() == Net().state_dict().keys()
    assert kit.run_evaluation(2, tmp_path / "eval", "--checkpoint", folder) == straight.kind("eval")[-1]


def test_final_says_what_it_is(one, plain, tmp_path):
    final = one.folder / "final"
    config = json.loads((final / "config.json").read_text())
    assert (config["task"], config["architectures"], config["net"]["width"]) == ("plain", ["Net"], 16)
    assert "library_name" not in (final / "README.md").read_text()
    data = kit.flags(task="plain", validation_file=plain["validation_file"], dtype="float64")
    line = kit.run_evaluation(1, tmp_path / "eval", "--model_name_or_path", final, *data)
    assert {**line, "step": 24} == one.kind("eval")[-1]


# ---- weights of a folder ---------------------------------------------------------------------------------------------


def build(folder, dtype="float32", **options) -> torch.nn.Module:
    return build_plain_model(RunConfig(model_name_or_path=str(folder), dtype=dtype), lambda: Net(**options))


def test_weights_that_do_not_fit_are_named_in_one_error(tmp_path):
    state = Net(width=16).state_dict()
    del state["enter.bias"], state["shift"]
    save_file(state | {"else": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError) as raised:
        build(tmp_path, width=4)
    for part in ('"shift", "enter.bias"', '"else"', "size mismatch"):
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


def test_config_of_another_task_is_refused(tmp_path):
    cfg = RunConfig(task="plain", model_name_or_path=str(tmp_path))
    assert saved_config(cfg) == saved_config(RunConfig()) == {}
    (tmp_path / "config.json").write_text('{"task": "causal_lm"}')
    with pytest.raises(UsageError, match="belongs to task causal_lm"):
        saved_config(cfg)


# ---- unusual parameters ----------------------------------------------------------------------------------------------


class Unusual(nn.Module):
    """Two linear layers, and between them what a test adds."""

    def __init__(self, add):
        super().__init__()
        self.shape = (plain_task.LABELS, plain_task.CLASSES)
        self.enter, self.leave = nn.Linear(plain_task.FEATURES, 8), nn.Linear(8, self.shape[0] * self.shape[1])
        self.between = add(self) or nn.Identity()

    def forward(self, x):
        return self.leave(self.between(torch.tanh(self.enter(x)))).unflatten(-1, self.shape)


class Scale(nn.Module):
    """Multiplies by a parameter."""

    def __init__(self, scale):
        super().__init__()
        self.scale = nn.Parameter(scale)

    def forward(self, x):
        return (x @ self.scale if self.scale.dim() == 2 else x * self.scale).to(x.dtype).contiguous()


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
    "double": lambda net: Scale(torch.ones(8, dtype=torch.float64)),
    "extra": lambda net: Extra(),
}


@dataclass
class Options(plain_task.Options):
    net: str = option("a key of NETS", "tied", from_checkpoint=True)


class Task(plain_task.Task):
    def build(self, weights=None, empty=False):
        return build_plain_model(self.cfg, lambda: Unusual(NETS[self.options.net]), weights, empty)


@pytest.fixture(scope="module")
def unusual(tmp_path_factory):
    """Return a function from the name of a net to the flags of its run."""
    with plain_task.registered(types.SimpleNamespace(Task=Task, Options=Options), "unusual"):
        data = plain_task.write_data(tmp_path_factory.mktemp("unusual"))
        fields = {"lr_scheduler_type": "constant", "eval_steps": 4, "save_steps": 2, "max_steps": 4}
        yield lambda net, **more: flags(data, task="unusual", net=net, **fields | {"dtype": "float32"} | more)


def _run_all(argvs):
    """Run commands, each in a folder of its own, in this process."""
    from accelerate.state import AcceleratorState

    import eval as evaluation
    import train

    for script, *argv in argvs:
        AcceleratorState._reset_state(reset_partial_state=True)
        (train if script == "train" else evaluation).main([str(word) for word in argv])


def test_unusual_modules_train_resume_and_evaluate(unusual, tmp_path):
    nets = [net for net in NETS if net != "extra"]
    runs = [("train", *unusual(net), "--output_dir", tmp_path / net) for net in nets]
    kit.spawn(1, _run_all, runs, out=tmp_path / "out", timeout=300)
    again = []
    for net in nets:
        folder = shutil.copytree(tmp_path / net, tmp_path / f"{net}-resumed")
        shutil.rmtree(folder / "final")
        shutil.rmtree(folder / "checkpoints" / "step_00000004")
        again.append(("train", *unusual(net), "--output_dir", folder))
        again.append(("eval", "--checkpoint", tmp_path / net, "--output_dir", tmp_path / f"{net}-evaluated"))
    kit.spawn(1, _run_all, again, out=tmp_path / "again", timeout=300)
    for net in nets:
        run, resumed = kit.Run(tmp_path / net), kit.Run(tmp_path / f"{net}-resumed")
        assert kit.same(run.weights, resumed.weights), net
        assert json.loads((tmp_path / f"{net}-evaluated" / "eval.json").read_text()) == run.kind("eval")[-1], net


@pytest.mark.cluster
@pytest.mark.parametrize("net", ["tied", "transposed"])
def test_unusual_modules_are_sharded(unusual, tmp_path, net):
    argv, env = unusual(net, dtype="float64"), kit.where("fsdp2", 2, mixed_precision="no")
    two = kit.run_training(2, tmp_path / "two", *argv, env=env, units=1)
    assert kit.distance(kit.run_training(1, tmp_path / "one", *argv).weights, two.weights) <= 1e-10


def test_extra_state_is_refused(unusual, tmp_path):
    codes, [text] = kit.run_command("train.py", *unusual("extra", output_dir="run"), folder=tmp_path / "here")
    assert codes == [2], text
    assert "extra_state" in text.splitlines()[-1], text
