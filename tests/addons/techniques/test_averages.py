import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from addons.techniques.ema import EMA
from addons.techniques.lookahead import Lookahead
from addons.techniques.swa import SWA
from engine.distributed.running_statistics import StepBuffers
from engine.distributed.sharded_tensors import local_part
from engine.run.train_state import Run, TrainState
from tests.engine.run.test_train_state import not_a_number, poison
from tests.helpers import batch_norm, classifier_task, kit, technique_runs

STEPS = technique_runs.STEPS
TECHNIQUES = {
    "lookahead": {"k": 3, "alpha": 0.3},  # resumed runs begin between two moves
    "ema": {"decay": 0.6, "warmup": True, "final": True},
    "swa": {"start": 0.4, "every": 2},  # steps 2 and 4
    "lawa": {"k": 2, "every": 1},  # steps 4 and 5
}


def fields(folder, **more) -> dict:
    return technique_runs.files(folder) | {"techniques": json.dumps(TECHNIQUES)} | more


class PlainAverages:
    """The four techniques of TECHNIQUES in a plain loop."""

    def __init__(self, values: dict):
        self.plain = technique_runs.Plain(values)
        self.optimizer = self.plain.optimizer()
        self.ema, self.slow, self.seen = self.weights(), self.weights(), []
        self.plain.train(self.update)

    def weights(self) -> dict:
        return {name: value.detach().clone() for name, value in self.plain.model.named_parameters()}

    def update(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.plain.loss().backward()
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.plain.model.named_parameters():
                if step % 3 == 2:
                    self.slow[name] = 0.7 * self.slow[name] + 0.3 * parameter
                    parameter.copy_(self.slow[name])
                decay = min(0.6, (1 + step) / (10 + step))
                self.ema[name] = decay * self.ema[name] + (1 - decay) * parameter
        self.seen.append(self.weights())

    def mean(self, *steps: int) -> dict:
        return {name: sum(self.seen[step - 1][name] for step in steps) / len(steps) for name in self.ema}


def last_parts(folder, part: str, checkpoint: Path | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of a part in a checkpoint (default: the last), with the names of the saved model."""
    found = kit.load_weights(checkpoint or sorted((Path(folder) / "checkpoints").iterdir())[-1], part)
    return {name.replace("/model.", "/"): value for name, value in found.items() if "/" in name}


def average(folder, part: str, checkpoint: Path | None = None) -> dict[str, torch.Tensor]:
    found = last_parts(folder, part, checkpoint)
    return {name.removeprefix("average/"): value for name, value in found.items()}


# ---- the numbers -------------------------------------------------------------------------------------------------------


def test_averages_and_lookahead_are_exact_for_every_split(tmp_path):
    values = fields(tmp_path)
    plain = PlainAverages(values)
    technique_runs.check_splits(tmp_path, values, plain.ema | {"lm_head.weight": plain.ema["transformer.wte.weight"]})
    for world, micro in technique_runs.SPLITS:
        folder = tmp_path / f"{world}x{micro}"
        assert kit.distance(average(folder, "swa"), plain.mean(2, 4)) <= 1e-10
        ring = last_parts(folder, "lawa")
        for slot, step in ((0, 5), (1, 4)):
            copy = {name: ring[f"{slot}/{name}"] for name in plain.ema}
            assert kit.distance(copy, plain.seen[step - 1]) <= 1e-10
        raw = kit.load_weights(folder / "checkpoints" / "step_00000005")
        assert kit.distance({name: raw[name] for name in plain.ema}, plain.seen[-1]) <= 1e-10
        slow = {name.removeprefix("slow/"): value for name, value in last_parts(folder, "lookahead").items()}
        assert kit.distance(slow, plain.slow) <= 1e-10
    assert kit.distance(plain.ema, plain.seen[-1]) > 1e-3


@pytest.mark.parametrize("kind", [EMA, Lookahead])
def test_resume_shows_a_technique_that_is_not_restored(tmp_path, monkeypatch, kind):
    """The check that a resumed run ends bitwise the same fails if the EMA or the slow weights are not in the checkpoint."""
    monkeypatch.setattr(kind, "load_state_dict", lambda self, state: None)
    with pytest.raises(AssertionError):
        technique_runs.check_resume(tmp_path, fields(tmp_path), world=1, micro=16)


@pytest.mark.cluster
def test_mutant_that_saves_one_shard_is_caught(tmp_path, monkeypatch):
    """An EMA with the local shard as state: one rank's rows of it come back on every rank."""
    monkeypatch.setattr(
        EMA, "state_dict", lambda self: {f"average/{n}": local_part(value) for n, value in self.weights.items()}
    )
    with pytest.raises(AssertionError):
        technique_runs.check_fsdp2(tmp_path, fields(tmp_path))


# ---- skipped updates, buffers ------------------------------------------------------------------------------------------


def check_every_step(folder: Path, steps: int, skipped: int | None = None, decay: float = 0.6) -> None:
    """Recompute the EMA of each checkpoint from the one before and its weights; `skipped` changes nothing."""

    def saved(step: int) -> tuple[dict, dict]:
        checkpoint = folder / "checkpoints" / f"step_{step:08d}"
        return average(folder, "ema", checkpoint), kit.load_weights(checkpoint)

    before, _ = saved(1)
    for step in range(2, steps + 1):
        now, weights = saved(step)
        assert kit.same(now, before) == (step == skipped)
        for name, value in now.items():
            expected = decay * before[name] + (1 - decay) * weights[name]
            if step == skipped:
                expected = before[name]
            elif not value.is_floating_point():
                expected = weights[name]
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)
        before = now


@pytest.mark.parametrize("mutant", [False, True])
def test_skipped_update_leaves_the_average_unchanged(tmp_path, monkeypatch, mutant):
    update = EMA.after_update
    if mutant:
        monkeypatch.setattr(EMA, "after_update", lambda self, skipped: update(self, torch.zeros_like(skipped)))
    poison(monkeypatch, not_a_number, {3})
    values = technique_runs.files(tmp_path) | {"techniques": json.dumps({"ema": {"decay": 0.6}}), "save_steps": 1}
    run = technique_runs.train(tmp_path / "run", values, 2, 4, env={"NOTES": str(tmp_path)})
    assert run.kind("train")[-1]["skipped"] == 1
    with pytest.raises(AssertionError) if mutant else nullcontext():
        check_every_step(run.folder, STEPS, 3)


@pytest.mark.parametrize("place", [None, "fsdp2"])
def test_statistics_of_batch_norm_are_averaged(tmp_path, monkeypatch, place):
    """The model also has a constant with -inf."""
    monkeypatch.setattr(classifier_task.Task, "build", batch_norm.build)
    flags = batch_norm.recipe(
        tmp_path,
        max_steps=4,
        save_steps=1,
        save_total_limit=9,
        eval_steps=4,
        techniques=json.dumps({"ema": {"decay": 0.6}}),
    )
    env = kit.where("fsdp2", 2, mixed_precision="no") if place else None
    with classifier_task.registered():
        run = kit.run_training(2, tmp_path / "run", *flags, env=env)
    check_every_step(run.folder, 4)
    saved = average(run.folder, "ema")
    assert saved["constant"].tolist() == [1 / 3, -0.0, float("-inf")]
    assert saved["blocks.0.norm.num_batches_tracked"] == 4
    line = run.kind("eval")[-1]
    assert line["ema/loss"] != line["loss"]


# ---- evaluation --------------------------------------------------------------------------------------------------------


def test_a_longer_run_starts_its_mean_again(tmp_path):
    """SWA over the last half: an extended run ends with the mean of a straight run of that length, or is refused."""
    values = technique_runs.files(tmp_path) | {"techniques": json.dumps({"swa": {"start": 0.5, "final": True}})}
    long = technique_runs.train(tmp_path / "long", values, max_steps=10)
    short = technique_runs.train(tmp_path / "short", values, max_steps=4)
    shutil.rmtree(short.folder / "final")
    argv = kit.flags(**values | {"per_device_batch_size": 16, "max_steps": 8, "output_dir": short.folder})
    codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / "here", world=2)
    assert codes == [2, 2]
    assert "techniques: swa: with start 0.5 the mean of this run began at step 2" in "".join(texts)
    assert kit.same(technique_runs.train(short.folder, values, max_steps=10).weights, long.weights)


def test_swa_that_is_resumed_and_saved_without_a_step_remembers_its_step():
    model = torch.nn.Linear(2, 2)
    backend = SimpleNamespace(buffers=StepBuffers(model, torch.device("cpu"), False))
    swa = SWA()
    swa.run = Run(None, backend, None, {}, model, model, None, 100, TrainState(step=100))
    swa.begin()
    swa.load_state_dict(swa.state_dict() | {"count": 26, "step": 100})
    assert swa.state_dict()["step"] == 100  # by which a resumed run of another length is refused
