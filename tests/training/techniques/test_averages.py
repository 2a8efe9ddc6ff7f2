import json
from pathlib import Path

import pytest
import torch

from src.training.techniques.ema import EMA
from src.training.techniques.lookahead import Lookahead
from tests.helpers import kit, technique_runs

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


def last_parts(folder, part: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a part in the last checkpoint, with the names of the saved model."""
    newest = sorted((Path(folder) / "checkpoints").iterdir())[-1]
    found = kit.load_weights(newest, part)
    return {name.replace("/model.", "/"): value for name, value in found.items() if "/" in name}


def average(folder, part: str) -> dict[str, torch.Tensor]:
    found = last_parts(folder, part)
    return {name.removeprefix("average/"): value for name, value in found.items()}


# ---- the numbers -------------------------------------------------------------------------------------------------------


def test_averages_and_lookahead_are_exact_for_every_split(tmp_path):
    values = fields(tmp_path)
    plain = PlainAverages(values)
    technique_runs.check_splits(tmp_path, values, plain.ema | {"lm_head.weight": plain.ema["transformer.wte.weight"]})
    for world, micro in technique_runs.ACCUMULATION_1 + technique_runs.ACCUMULATION_4:
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


def test_averages_and_lookahead_resume(tmp_path):
    technique_runs.check_resume(tmp_path, fields(tmp_path))


@pytest.mark.parametrize("kind", [EMA, Lookahead])
def test_resume_shows_a_technique_that_is_not_restored(tmp_path, monkeypatch, kind):
    """The check of the test above fails if the EMA or the slow weights are not in the checkpoint."""
    monkeypatch.setattr(kind, "load_state_dict", lambda self, state: None)
    with pytest.raises(AssertionError):
        technique_runs.check_resume(tmp_path, fields(tmp_path), world=1, micro=16)


def test_averages_and_lookahead_under_fsdp2(tmp_path):
    technique_runs.check_fsdp2(tmp_path, fields(tmp_path))
    one, sharded = tmp_path / "one", tmp_path / "fsdp2" / "straight"
    for part in ("ema", "swa", "lawa", "lookahead"):
        assert kit.distance(last_parts(one, part), last_parts(sharded, part)) <= 2e-5
