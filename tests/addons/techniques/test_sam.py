"""SAM, ASAM and the gradient norm penalty against plain loops, and the mutants that are only nearly right."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from addons.techniques import TECHNIQUES, asam, gradient_norm_penalty, sam
from engine.distributed.running_statistics import StepBuffers
from engine.run.totals_and_votes import StepTotals
from tests.helpers import kit, plain_task, technique_runs
from tests.helpers.fp16 import train_in_fp16
from tests.helpers.step_recipe import recipe

OPTIONS = {"sam": {"rho": 0.5}, "asam": {"rho": 2.0, "eta": 0.1}, "gradient_norm_penalty": {"rho": 0.5, "alpha": 0.7}}


def fields(folder, name: str = "sam", **options) -> dict:
    return technique_runs.files(folder) | {"techniques": json.dumps({name: OPTIONS[name] | options})}


def plain_weights(values: dict) -> dict[str, torch.Tensor]:
    """Return the weights of a plain loop, as the papers write the step."""
    plain, [o] = technique_runs.Plain(values), json.loads(values["techniques"]).values()
    optimizer, named = plain.optimizer(), dict(plain.model.named_parameters())

    def update(step: int) -> None:
        first = dict(zip(named, torch.autograd.grad(plain.loss(), list(named.values())), strict=True))
        sizes = {n: p.detach().abs() + o["eta"] if "eta" in o and "bias" not in n else 1.0 for n, p in named.items()}
        norm = torch.cat([(sizes[n] * g).flatten() for n, g in first.items()]).norm()
        before = {n: p.detach().clone() for n, p in named.items()}
        with torch.no_grad():
            for n, p in named.items():
                p += o["rho"] * sizes[n] ** 2 * first[n] / norm
        second = dict(zip(named, torch.autograd.grad(plain.loss(), list(named.values())), strict=True))
        share = o.get("alpha", 1.0)
        with torch.no_grad():
            for n, p in named.items():
                p.copy_(before[n])
                p.grad = (1 - share) * first[n] + share * second[n]
        optimizer.step()

    return plain.train(update)


@pytest.mark.parametrize("name", OPTIONS)
def test_reported_loss_is_that_of_the_unmoved_weights(tmp_path, name):
    values = fields(tmp_path, name)
    run = technique_runs.train(tmp_path / "run", values | {"max_steps": 1})
    assert run.losses() == pytest.approx([technique_runs.Plain(values).loss().item()], rel=1e-12)


class MovedByOneMicroBatch(sam.SAM):
    """The mutant that makes the first pass over one micro-batch."""

    def around_gradient(self, compute, batch, totals):
        passes = iter([batch[-1:], batch])
        return super().around_gradient(lambda _, totals: compute(next(passes), totals), batch, totals)


class OtherMasks(sam.SAM):
    """The mutant that draws other dropout masks in the second pass."""

    def around_gradient(self, compute, batch, totals):
        other = [(replace(micro, seed=micro.seed + 1), rows) for micro, rows in batch]
        passes = iter([batch, other])
        return super().around_gradient(lambda _, totals: compute(next(passes), totals), batch, totals)


@pytest.mark.parametrize("mutant", [MovedByOneMicroBatch, OtherMasks])
def test_mutants_are_caught(tmp_path, monkeypatch, mutant):
    values = technique_runs.with_dropout(tmp_path, fields(tmp_path))
    right = technique_runs.train(tmp_path / "right", values, 1, 2)
    monkeypatch.setitem(TECHNIQUES, "sam", lambda: mutant)
    assert kit.distance(technique_runs.train(tmp_path / "mutant", values, 1, 2).weights, right.weights) > 1e-4


# ---- what else may be in a step ----------------------------------------------------------------------------------------


def test_plain_modules_frozen_unused_and_with_batch_norm(plain, tmp_path):
    """Running statistics are those of the first passes. The loss does not use one layer; a teacher is frozen."""
    technique = json.dumps({"gradient_norm_penalty": {"rho": 0.1}})
    options = {"norm": True, "unused": True, "teacher": True, "ddp_find_unused_parameters": True, "max_steps": 3}
    options["adam_epsilon"] = 1e-4  # the gradient of a bias before a batch norm is zero except for rounding
    runs = [
        kit.run_training(world, tmp_path / f"{world}", *plain_task.flags(plain, **options, techniques=technique))
        for world in (1, 2)
    ]
    assert kit.distance(runs[0].weights, runs[1].weights) <= 1e-10
    one_step = options | {"max_steps": 1}
    found = [
        kit.run_training(1, tmp_path / f"step{i}", *plain_task.flags(plain, **one_step, **more)).weights
        for i, more in enumerate([{}, {"techniques": technique}])
    ]
    statistics = [{name: value for name, value in weights.items() if "running" in name} for weights in found]
    assert kit.same(*statistics)
    assert not kit.same(*found)


@pytest.mark.parametrize("scale, skipped", [(2.0**10, 0), (2.0**120, 4)])
def test_fp16_scale_has_no_effect_and_an_overflow_skips_the_update(files, tmp_path, scale, skipped):
    fields = {"dtype": "float32", "global_batch_size": 8, "per_device_batch_size": 4, "warmup_steps": 0}
    flags = recipe(files, **fields, max_steps=4, max_length=16, techniques=json.dumps({"sam": {"rho": 0.5}}))
    reference = kit.run_training(1, tmp_path / "fp32", *flags, "--learning_rate", 0 if skipped else 3e-3)
    kit.spawn(1, train_in_fp16, [*flags, "--output_dir", tmp_path / "fp16"], scale, out=tmp_path / "out")
    run = kit.Run(tmp_path / "fp16")
    assert run.kind("train")[-1]["skipped"] == skipped
    if skipped:
        assert kit.same(run.weights, reference.weights)
        return
    for half, full in zip(run.kind("train"), reference.kind("train"), strict=True):
        assert half["grad_norm"] == pytest.approx(full["grad_norm"], rel=0.02)
        assert half["loss"] == pytest.approx(full["loss"], rel=0.005)


@pytest.mark.parametrize("kind", [sam.SAM, asam.ASAM, gradient_norm_penalty.GradientNormPenalty])
@pytest.mark.parametrize("value", [0.0, 1e-30, float("inf"), float("nan")])
def test_degenerate_gradients(kind, value):
    """A gradient of zero moves nothing; one that is not finite leaves the weights and makes the gradient of the step NaN."""
    model = torch.nn.Linear(3, 2)
    before, seen = [p.detach().clone() for p in model.parameters()], []

    def compute(batch, totals):
        seen.append([p.detach().clone() for p in model.parameters()])
        model.weight.grad = torch.full((2, 3), 1.0 if len(seen) == 2 else 0.0)
        model.bias.grad = torch.tensor([value, 0.0]) if len(seen) == 1 else torch.ones(2)

    technique = kind()
    buffers = StepBuffers(model, torch.device("cpu"), False)
    technique.run = SimpleNamespace(
        parameters=lambda: dict(model.named_parameters()), backend=SimpleNamespace(buffers=buffers)
    )
    technique.around_gradient(compute, [], StepTotals(weight=1.0))
    for values in (seen[1], list(model.parameters())):
        assert all(torch.equal(one, other) for one, other in zip(values, before, strict=True))
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert found.isfinite().all() if value < 1 else not found.isfinite().any()
