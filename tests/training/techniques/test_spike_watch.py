"""A spike of the gradient is skipped, or undone by a rollback; the step counter and the data continue."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch

import train
from src.checkpointing import roll_back
from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.data.batch_plan import PlanConfig, plan
from src.training.technique_chain import TechniqueChain
from src.training.techniques.spike_watch import SpikeWatch
from src.training.train_state import Intervals
from tests.helpers import kit, technique_runs
from tests.training.test_step import _count_syncs

SPIKE, STEPS = 5, 9
OPTIONS = {"factor": 8.0, "window": 8, "warmup": 2}


@pytest.fixture
def spikes(monkeypatch):
    """Return a set of steps, by default {SPIKE}, with gradients a hundred times too large on all ranks."""
    steps, compute = {SPIKE}, train.compute_gradient

    def spiked(strategy, module, window, total_weight):
        factor = 100 if window[0][0].step + 1 in steps else 1
        return compute(strategy, module, window, total_weight / factor)

    monkeypatch.setattr(train, "compute_gradient", spiked)
    return steps


def fields(folder, **more) -> dict:
    return technique_runs.files(folder) | {"techniques": json.dumps({"spike_watch": OPTIONS | more})}


def rolled(folder, **more) -> dict:
    """Return fields of a run that sees other rows in each step, with a learning rate that falls with each update."""
    return fields(folder, action="roll_back", **more) | {
        "global_batch_size": 4,
        "max_steps": STEPS,
        "lr_scheduler_type": "linear",
    }


def undone_weights(values: dict, repeat: bool = False) -> dict[str, torch.Tensor]:
    """Return the weights of a plain loop that returns to the state after step 4 when it has done step 6.

    With `repeat`, the naive loop that also returns to the data of step 5."""
    plain = technique_runs.Plain(values)
    _, splits = kit.open_data(**{name: values[name] for name in ("model_config", "train_file", "dtype")})
    optimizer, updates, kept = plain.optimizer(), 0, None
    config = PlanConfig(technique_runs.ROWS, 4, 4, seed=42)
    data = [4, 5, 6] if repeat else [6, 7, 8]
    for step, at in enumerate([0, 1, 2, 3, 4, 5, *data], start=1):
        ids = np.concatenate([micro.ids for micro in plan(config, *divmod(at, 4))])
        plain.batch = plain.task.collate(splits["train"].rows(ids), training=True)
        optimizer.zero_grad()
        plain.loss().backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - updates / STEPS)
        if step != SPIKE:
            optimizer.step()
            updates += 1
        if step == 4:
            kept = copy.deepcopy((plain.model.state_dict(), optimizer.state_dict(), updates))
        if step == SPIKE + 1:
            plain.model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
            updates = kept[2]
    return plain.model.state_dict()


def test_skipped_spike_is_exact_for_every_split(tmp_path, spikes):
    values = fields(tmp_path)
    plain = technique_runs.Plain(values)
    optimizer = plain.optimizer()

    def update(step: int) -> None:
        optimizer.zero_grad()
        plain.loss().backward()
        if step + 1 != SPIKE:
            optimizer.step()

    run = technique_runs.check_splits(tmp_path, values, plain.train(update))
    assert [line["skipped"] for line in run.kind("train")] == [0, 0, 0, 0, 1]
    assert run.kind("train")[-1]["grad_norm"] > 0
    assert f"step {SPIKE}: the gradient" in (tmp_path / "1x16.out" / "rank0.txt").read_text()


def test_statistics_survive_a_resume(tmp_path, spikes, monkeypatch):
    spikes |= {4}
    values = fields(tmp_path)
    technique_runs.check_resume(tmp_path / "right", values)
    monkeypatch.setattr(SpikeWatch, "load_state_dict", lambda self, state: None)
    with pytest.raises(AssertionError):
        technique_runs.check_resume(tmp_path / "mutant", values)


def test_roll_back_trains_past_the_data_and_resumes(tmp_path, spikes):
    values = rolled(tmp_path) | {"save_steps": 1}
    straight = technique_runs.train(tmp_path / "straight", values, 2, 1)
    reference = undone_weights(values)
    assert kit.distance(straight.weights, {name: reference[name] for name in straight.weights}) <= 1e-10
    repeated = undone_weights(values, repeat=True)
    assert kit.distance(straight.weights, {name: repeated[name] for name in straight.weights}) > 1e-4
    [line] = straight.kind("roll_back")
    assert (line["step"], line["to"], line["before"]) == (6, 4, 5)
    assert '"to": 4' in kit.ledger_text(straight.folder)
    for last in (4, 5, 6, 7):
        resumed = tmp_path / f"resumed{last}"
        shutil.copytree(straight.folder, resumed)
        for path in [resumed / "final", *sorted((resumed / "checkpoints").iterdir())[last:]]:
            shutil.rmtree(path)
        again = technique_runs.train(resumed, values, 2, 1)
        assert kit.same(again.weights, straight.weights), last
        assert kit.timeless(resumed) == kit.timeless(straight.folder), last
        assert kit.ledger_text(resumed) == kit.ledger_text(straight.folder), last


@pytest.mark.cluster
def test_roll_back_under_fsdp2(tmp_path, spikes):
    technique_runs.check_fsdp2(tmp_path, rolled(tmp_path))


def test_roll_backs_are_limited(tmp_path, spikes):
    spikes |= {7}
    argv = kit.flags(**rolled(tmp_path, max_rollbacks=1), per_device_batch_size=4, output_dir="run")
    codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / "cwd", world=2)
    assert codes == [1, 1]
    assert "step 7" in "".join(texts)
    assert "max_rollbacks" in "".join(texts)


def test_no_checkpoint_before_the_spike(tmp_path, spikes):
    run = technique_runs.train(tmp_path / "run", rolled(tmp_path) | {"save_steps": 7}, 1, 4)
    assert not run.kind("roll_back")
    assert "no checkpoint at a multiple of save_steps before step 5" in (tmp_path / "run.out" / "rank0.txt").read_text()


@pytest.mark.parametrize("save_steps, at, to", [(3, {5, 8}, [3, 6]), (2, {6, 8}, [4, 4])])
def test_other_checkpoints_do_not_change_a_rollback(tmp_path, spikes, monkeypatch, save_steps, at, to):
    """One run saves when save_steps says so, the other after every step, and keeps two."""
    spikes.clear()
    spikes |= at
    values = rolled(tmp_path) | {"save_steps": save_steps}
    straight = technique_runs.train(tmp_path / "straight", values, 1, 4)
    monkeypatch.setattr(Intervals, "save", lambda self: (self.state.step, self.state.evaluated) != self.last_save)
    often = technique_runs.train(tmp_path / "often", values | {"save_total_limit": 2}, 1, 4)
    assert [line["to"] for line in straight.kind("roll_back")] == to
    assert kit.same(often.weights, straight.weights)
    monkeypatch.setattr(roll_back, "may_return_to", lambda *args: True)  # the mutant: any checkpoint
    mutant = technique_runs.train(tmp_path / "mutant", values | {"save_total_limit": 2}, 1, 4)
    assert kit.distance(mutant.weights, straight.weights) > 1e-4


def test_endless_window_is_refused():
    with pytest.raises(UsageError, match="window"):
        TechniqueChain(RunConfig(techniques={"spike_watch": {"window": 10**9}}))


def test_nothing_waits_for_the_device(tmp_path):
    argv = kit.flags(**fields(tmp_path) | {"dtype": "float32"}, per_device_batch_size=16, output_dir=tmp_path / "run")
    [counts] = kit.spawn(1, _count_syncs, argv, False, out=tmp_path / "out")
    assert counts == [0] * 2 * technique_runs.STEPS
