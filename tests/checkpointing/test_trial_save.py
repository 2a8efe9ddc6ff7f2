"""The trial save: a model or part that could not resume is refused on every rank before the first step."""

import errno
import random
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from src.checkpointing import checkpoint_format, trial_save
from src.tasks import causal_lm
from tests.checkpointing import recipe
from tests.checkpointing.recipe import command
from tests.helpers import kit, plain_task, strategy_runs


def fork(**methods) -> types.SimpleNamespace:
    """Return a module with the task of causal_lm and other methods, as a fork that copied the file."""
    return types.SimpleNamespace(Options=causal_lm.Options, Task=type("Task", (causal_lm.Task,), methods))


def with_scale(self, weights=None, empty=False):
    """Add a parameter that GPT2LMHeadModel does not have: save_pretrained writes it, from_pretrained drops it."""
    model = causal_lm.Task.build(self, weights, empty)
    model.scale = torch.nn.Parameter(torch.ones(3))
    return model


class Adapter(torch.nn.Module):
    """Saves files of its own and no config.json, as adapters do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def save_pretrained(self, folder, state_dict=None, **_):
        (Path(folder) / "adapter_config.json").write_text("{}")

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


def live_save(self, weights=None, empty=False):
    """A save_pretrained that ignores state_dict, as some libraries have: it would save what training changes meanwhile."""
    model = causal_lm.Task.build(self, weights, empty)
    original = model.save_pretrained
    model.save_pretrained = lambda folder, state_dict=None, **_: original(folder)
    return model


CASES = {
    "dropped parameter": (with_scale, 2, ["scale comes back with other values"]),
    "adapter": (
        lambda self, *args: Adapter(causal_lm.Task.build(self, *args)),
        1,
        ["no config.json", "adapter_config"],
    ),
    "live weights": (live_save, 1, ["comes back with other values; transformer."]),
}


@pytest.mark.parametrize("case", CASES)
def test_model_that_does_not_come_back_is_refused_before_the_first_step(tiny, tmp_path, case):
    build, world, parts = CASES[case]
    with plain_task.registered(fork(build=build), "fork"):
        codes, outputs = command(recipe.flags(tiny, task="fork"), tmp_path, world)
        assert codes == [2] * world, outputs
        for part in ("error: check_save: ", *parts):
            assert part in outputs[0]
        assert "Traceback" not in "".join(outputs)
        assert not (tmp_path / "run" / "metrics.jsonl").exists()
        assert not list((tmp_path / "run").glob(".*"))[1:]  # besides the lock
        if case == "dropped parameter":  # the mutant: without the trial, a whole run is trained
            codes, outputs = command(recipe.flags(tiny, task="fork", check_save=False), tmp_path)
            assert codes == [0]


def _trial(argv, change):
    """Train with `change(checkpointer)` before the trial save; return what it has left changed."""
    import train

    begin = train.Checkpointer.begin
    seen = {}

    def states():
        weights = {name: value.clone() for name, value in seen["model"].state_dict().items()}
        return weights, torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    def spied(self, *args):
        change(self)
        seen["model"], task = self.model, dict(vars(self.task))
        before = states()
        begin(self, *args)
        after = states()
        assert kit.same(before[0], after[0])
        assert torch.equal(before[1], after[1])
        assert before[2:] == after[2:]
        assert dict(vars(self.task)) == task

    train.Checkpointer.begin = spied
    train.main([str(word) for word in argv])


def test_trial_leaves_nothing_behind(plain, tmp_path):
    argv = plain_task.flags(plain, max_steps=1, output_dir=tmp_path / "run", norm=True, tied=True)
    kit.spawn(1, _trial, argv, lambda checkpointer: None, out=tmp_path / "out")
    assert not [path for path in (tmp_path / "run").iterdir() if "trial" in path.name]


class Part:
    def __init__(self, state):
        self.state_dict = lambda: state


@pytest.mark.parametrize("state", [{"ema": {"w": torch.zeros(2)}}, {"ema": {1: 2}}, {"ema": float("nan")}], ids=str)
def test_part_whose_state_is_not_flat_is_refused(plain, tmp_path, state):
    argv = plain_task.flags(plain, output_dir=tmp_path / "run")
    with pytest.raises(kit.RankFailed, match="check_save: ema in the state of ema is a "):
        kit.spawn(1, _trial, argv, lambda c: c.parts.update(ema=Part(state)), out=tmp_path / "out")


def test_part_of_tensors_and_numbers_is_accepted(plain, tmp_path):
    part = Part({"w": torch.zeros(2, 3).t(), "decay": 0.99, "step": 3, "name": "ema", "on": True, "none": None})
    argv = plain_task.flags(plain, max_steps=1, output_dir=tmp_path / "run")
    kit.spawn(1, _trial, argv, lambda c: c.parts.update(ema=part), out=tmp_path / "out")


def test_failing_disk_is_no_refusal(tiny, tmp_path, monkeypatch):
    write = checkpoint_format.write_checkpoint

    def full(folder, *rest):
        write(folder, *rest)
        if ".trial_save.tmp" in str(folder):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_format, "write_checkpoint", full)
    codes, outputs = command(recipe.flags(tiny), tmp_path, world=2)
    assert codes == [0, 0], outputs
    assert "warning: the trial save was skipped" in outputs[0]
    assert "No space left on device" in outputs[0]


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.cluster)])
def test_extra_state_is_refused(plain, tmp_path, world):
    class Net(plain_task.Net):
        def get_extra_state(self):
            return {"calls": 3}

        def set_extra_state(self, state):
            pass

    module = types.SimpleNamespace(Options=plain_task.Options, Task=plain_task.Task)
    with plain_task.registered(module, "fork"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_task, "Net", Net)
        argv = plain_task.flags(plain, task="fork", output_dir="run")
        env = strategy_runs.where("fsdp2", 2) if world == 2 else None
        codes, outputs = kit.run_command("train.py", *argv, folder=tmp_path, world=world, env=env)
    assert codes == [2] * world, outputs
    assert "_extra_state of " in outputs[0]


def test_mutant_that_saves_the_weights_unaltered_misses_a_dropped_parameter(tiny, tmp_path, monkeypatch):
    """The dropped parameter comes back with its initial value."""
    monkeypatch.setattr(trial_save, "_alter", lambda tensors: None)
    with plain_task.registered(fork(build=with_scale), "fork"):
        codes, outputs = command(recipe.flags(tiny, task="fork"), tmp_path)
    assert codes == [0], outputs
