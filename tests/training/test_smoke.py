"""--smoke: what a resumed run would not have is found in two steps; a sound run passes under every backend."""

import json
import random
import signal
import time
import types
from pathlib import Path

import pytest
import torch

import train
from src.tasks import causal_lm
from tests.conformance import mutants
from tests.helpers import kit, plain_task

LAUNCHES = [(None, 1), ("ddp", 2), pytest.param("fsdp2", 2, marks=pytest.mark.cluster)]


@pytest.mark.parametrize("backend, world", LAUNCHES)
def test_sound_run_passes(plain, tmp_path, backend, world):
    """With batch norm, dropout, a warmup, and an average if the add-on is here; the run's own checkpoints are neither
    read nor written."""
    env = kit.where(backend, world, mixed_precision="no") if backend else None
    fields = {"metric_for_best_model": "accuracy", "norm": True}
    if kit.has_addon("techniques/ema"):  # not in each fork
        fields["techniques"] = '{"ema": {"final": true}}'
    argv = plain_task.flags(plain, per_device_batch_size=4, warmup_steps=5, **fields)
    own = kit.run_training(world, tmp_path / "here" / "run", *argv, env=env)
    files = [path for path in own.folder.rglob("*") if path.is_file()]
    before = [path.stat().st_mtime_ns for path in files]
    argv += ["--smoke", "--output_dir", "run"]
    codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / "here", world=world, env=env)
    assert codes == [0] * world, texts
    assert texts[0].rstrip().endswith("smoke: passed")
    assert "depend on per_device_batch_size" not in texts[0]
    assert "nothing is left" not in texts[0]  # of the second pass, which has no steps
    assert ".smoke/final" not in texts[0]  # it is deleted
    assert [path.stat().st_mtime_ns for path in files] == before
    small = own.folder / ".smoke"
    lines = [json.loads(line) for line in (small / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [("train", 1), ("train", 2), ("eval", 2)]
    assert [line["loss"] for line in lines[:2]] == own.losses()[:2]  # the first steps of the run itself
    assert not (small / "checkpoints").exists()


# ---- tasks of a fork -------------------------------------------------------------------------------------------------


class WithParameter(causal_lm.Task):
    """Adds a parameter that GPT2LMHeadModel does not have: from_pretrained drops it."""

    def build(self, weights=None, empty=False):
        model = super().build(weights, empty)
        model.extra = torch.nn.Parameter(torch.ones(3))
        return model

    def loss(self, model, inputs):
        sums = super().loss(model, inputs)
        return sums | {"loss": sums["loss"] + model.extra.sum()}


class WithBuffer(causal_lm.Task):
    """Adds a buffer that training changes."""

    def build(self, weights=None, empty=False):
        model = super().build(weights, empty)
        model.register_buffer("extra", torch.zeros(3))
        model.base_model.register_forward_pre_hook(lambda *_: count(model))
        return model


def count(model) -> None:
    model.extra += model.training


class RandomMetric(causal_lm.Task):
    def metrics(self, sums, weight):
        return {"accuracy": random.SystemRandom().random()}


class Padded(causal_lm.Task):
    """The loss of a row depends on the padding."""

    def loss(self, model, inputs):
        sums = super().loss(model, inputs)
        return sums | {"loss": sums["loss"] * inputs["input_ids"].shape[1]}


class SavesLater(causal_lm.Task):
    """Its save_pretrained ignores state_dict, as that of some libraries: it saves what training changes meanwhile."""

    def build(self, weights=None, empty=False):
        model = super().build(weights, empty)
        original, saves = model.save_pretrained, []

        def save(folder, state_dict=None, **_):
            saves.append(folder)
            if len(saves) == 1:  # nothing may be trained during a later one
                kit.until(lambda: not any(torch.equal(p, state_dict[name]) for name, p in model.named_parameters()))
            original(folder)

        model.save_pretrained = save
        return model


def command_of_fork(tiny, folder, kind: type, world: int = 1, **fields) -> tuple[list, list[str]]:
    """Return (exit codes, what each rank printed) of a run of a fork's task."""
    values = {"task": "fork", "max_steps": 9, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    values |= {"global_batch_size": 8, "per_device_batch_size": 4, "output_dir": "run"}
    argv = kit.flags(**tiny, **values, **fields)
    with plain_task.registered(types.SimpleNamespace(Options=causal_lm.Options, Task=kind), "fork"):
        return kit.run_command("train.py", *argv, folder=folder, world=world)


def test_signal_between_two_passes_ends_the_test(plain, tmp_path, monkeypatch):
    def slow(*args):
        Path("reached").touch()
        time.sleep(600)

    monkeypatch.setattr(train.smoke, "snapshot", slow)
    flags = plain_task.flags(plain, per_device_batch_size=4, smoke=True, output_dir="run")
    ranks = kit.Ranks("train.py", *flags, folder=tmp_path)
    kit.until((tmp_path / "reached").exists)
    ranks.signal(signal.SIGTERM)
    assert ranks.wait(60) == [75], ranks.text()


@pytest.mark.parametrize(
    "kind, world, name",
    [
        (WithParameter, 2, "model/extra: "),
        (WithBuffer, 1, "model/extra: "),
        (RandomMetric, 2, "evaluation/accuracy: "),
        (causal_lm.Task, 1, "optimizer/exp_avg/"),
    ],
)
def test_what_does_not_come_back_is_named(tiny, tmp_path, monkeypatch, kind, world, name):
    if name.startswith("optimizer"):
        monkeypatch.setattr("src.distributed.backends.Backend.load_moments", lambda *_: None)
    codes, texts = command_of_fork(tiny, tmp_path / "here", kind, world, smoke=True)
    assert codes == [2] * world, texts
    assert name in texts[0].rstrip().splitlines()[-1]


@pytest.mark.parametrize(
    "kind, world, words",
    [
        (mutants.NumpyGenerator, 2, "`collate` returns another x for the same rows and the same seed"),
        (mutants.TorchSeedInLoss, 1, "`loss` seeds torch"),
        (mutants.MeanLoss, 1, "`loss` of `loss` in training is"),
        (mutants.MeanInEvaluation, 1, "`right` of `loss` in evaluation is"),
    ],
)
def test_mistake_of_a_task_is_named_before_the_first_step(plain, tmp_path, kind, world, words):
    """The sentence is the last line; more mutants are in tests/conformance/test_mistakes.py."""
    argv = plain_task.flags(plain, task="fork", smoke=True, output_dir="run")
    with plain_task.registered(types.SimpleNamespace(Options=plain_task.Options, Task=kind), "fork"):
        codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / "here", world=world)
    assert codes == [1] * world, texts
    last = texts[0].rstrip().splitlines()[-1]
    assert f"task fork (tests/conformance/mutants.py): {words}" in last
    assert not (tmp_path / "here" / "run" / ".smoke").exists()


def test_rows_that_depend_on_each_other_are_named(tiny, tmp_path):
    codes, texts = command_of_fork(tiny, tmp_path / "here", Padded, smoke=True)
    assert codes == [0], texts
    assert "depend on per_device_batch_size" in texts[0]


def test_checkpoint_of_later_weights_is_refused(tiny, tmp_path):
    """Smoke does not see it, because nothing is trained while the checkpoint of its last step is written."""
    codes, texts = command_of_fork(tiny, tmp_path / "here", SavesLater, save_steps=3)
    assert codes == [1], texts
    assert "training changes the model meanwhile" in texts[0]
    assert not (tmp_path / "here" / "run" / "checkpoints" / "step_00000003").exists()
