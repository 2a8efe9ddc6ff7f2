import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from addons.techniques import Technique
from addons.techniques.unfreeze import Unfreeze
from engine.config.errors import UsageError
from engine.config.run_config import RunConfig
from engine.run.train_state import Run
from tests.engine.run.test_train_state import not_a_number, poison
from tests.helpers import kit, technique_runs

STEPS = {"*.h.0.*": 4, "*.wpe.*": 3}


def fields(folder) -> dict:
    options = {"unfreeze": {"steps": STEPS}}
    return technique_runs.files(folder) | {"techniques": json.dumps(options), "max_grad_norm": 0.5}


def plain_weights(
    values: dict, zero_rate: bool = False, kind=torch.optim.AdamW, skipped: int = 0, **options
) -> dict[str, torch.Tensor]:
    """Return the weights of a plain loop that freezes by requires_grad; with `zero_rate`, only the rate is zero until then."""
    plain = technique_runs.Plain(values)
    first = {n: 4 if ".h.0." in n else 3 if ".wpe." in n else 1 for n, _ in plain.model.named_parameters()}
    named = dict(plain.model.named_parameters())
    groups = [{"params": [p], "weight_decay": 0.1 * (p.dim() >= 2), "name": name} for name, p in named.items()]
    optimizer = kind(groups, lr=1e-2, **options)

    def update(step: int) -> None:
        for group in optimizer.param_groups:
            trained = step + 1 >= first[group["name"]]
            if zero_rate:
                group["lr"] = 1e-2 * trained
            else:
                named[group["name"]].requires_grad_(trained)
        optimizer.zero_grad()
        plain.loss().backward()
        torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 0.5)
        if step + 1 != skipped:
            optimizer.step()

    return plain.train(update)


def test_mutant_rate_of_zero_differs(tmp_path):
    values = fields(tmp_path)
    assert kit.distance(plain_weights(values), plain_weights(values, zero_rate=True)) > 1e-4


def test_momentum_of_sgd_begins_later_than_that_of_others(tmp_path, monkeypatch):
    """Also after a step that was skipped."""
    poison(monkeypatch, not_a_number, {2})
    values = fields(tmp_path) | {"optim": "sgd"}
    run = technique_runs.train(tmp_path / "run", values, 1, 4, env={"NOTES": str(tmp_path)})
    expected = plain_weights(values, kind=torch.optim.SGD, skipped=2, momentum=0.9, foreach=False)
    assert kit.distance(run.weights, {name: expected[name] for name in run.weights}) <= 1e-10


def _drop_after_all_passes(self):
    parameters = dict(self.run.model.named_parameters())
    for name, first in self.first_step.items():
        if self.run.state.step < first:
            parameters[f"model.{name}"].grad = None


@pytest.mark.parametrize("other", ["sam", "gradient_norm_penalty", "hard_examples"])
def test_until_its_step_a_weight_is_as_if_frozen(tmp_path, monkeypatch, other):
    """The second pass of SAM neither moves it nor counts its gradient in the length of the move."""
    values = technique_runs.files(tmp_path)
    never = {"unfreeze": {"steps": {"*.mlp.*": technique_runs.STEPS + 1}}}
    frozen = technique_runs.train(
        tmp_path / "frozen", values | {"techniques": json.dumps({other: None}), "freeze": "*.mlp.*"}
    )
    values["techniques"] = json.dumps({other: None} | never)
    late = technique_runs.train(tmp_path / "late", values)
    assert kit.distance(late.weights, frozen.weights) <= 1e-10
    monkeypatch.setattr(Unfreeze, "around_gradient", Technique.around_gradient)
    monkeypatch.setattr(Unfreeze, "change_gradient", _drop_after_all_passes)
    mutant = technique_runs.train(tmp_path / "mutant", values)
    assert (kit.distance(mutant.weights, frozen.weights) > 1e-6) == (other != "hard_examples")


def test_a_step_after_the_end_is_refused():
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    unfreeze = Unfreeze(steps={"weight": 4, "bias": 9})
    unfreeze.change_model(model, RunConfig())
    for num_steps in (4, 3):
        unfreeze.run = cast("Run", SimpleNamespace(model=model, num_steps=num_steps))
        with nullcontext() if num_steps == 4 else pytest.raises(UsageError, match="step 4 is after the end"):
            unfreeze.check()
