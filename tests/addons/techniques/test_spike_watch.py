"""A spike of the gradient is skipped; the step counter and the data continue."""

import json

import pytest

import train
from addons.techniques.spike_watch import SpikeWatch
from engine.run.totals_and_votes import StepTotals
from tests.helpers import technique_runs

SPIKE = 5
OPTIONS = {"factor": 8.0, "window": 8, "warmup": 2}


@pytest.fixture
def spikes(monkeypatch):
    """Return a set of steps, by default {SPIKE}, with gradients a hundred times too large on all ranks."""
    steps, compute = {SPIKE}, train.compute_gradient

    def spiked(backend, module, batch, totals):
        factor = 100 if batch[0][0].step + 1 in steps else 1
        return compute(backend, module, batch, StepTotals(totals, weight=totals.weight / factor))

    monkeypatch.setattr(train, "compute_gradient", spiked)
    return steps


def fields(folder, **more) -> dict:
    return technique_runs.files(folder) | {"techniques": json.dumps({"spike_watch": OPTIONS | more})}


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


@pytest.mark.cluster
def test_spike_watch_under_fsdp2(tmp_path, spikes):
    technique_runs.check_fsdp2(tmp_path, fields(tmp_path))
