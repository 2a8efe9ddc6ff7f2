"""The promise: change the where, and the numbers do not move. Each test carries the mutant that it must catch."""

from contextlib import nullcontext

import pytest
import torch

import train
from engine.plan import seeding
from engine.run.totals_and_votes import StepLosses
from tests.helpers import kit, step_recipe

pytestmark = pytest.mark.conformance

STEPS = 60


def recipe(files, model="exact.yaml", **fields):
    return step_recipe.recipe(files, **{"model_config": files / model, "max_steps": STEPS} | fields)


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """The run that the others are compared with: one process, a whole global batch in one forward pass."""
    folder = tmp_path_factory.mktemp("promise")
    return kit.run_training(1, folder / "whole", *recipe(files, per_device_batch_size=32))


@pytest.mark.parametrize(
    "world, micro, tolerance, backend",
    [
        (1, 4, 1e-10, None),
        (2, 4, 1e-10, None),
        (3, 8, 1e-6, None),
        (2, 8, 1e-10, "fsdp2"),
    ],
)
def test_weights_and_losses_do_not_depend_on_the_split(files, whole, tmp_path, world, micro, tolerance, backend):
    env = kit.where(backend, world, mixed_precision="no") if backend else None
    run = kit.run_training(world, tmp_path / "run", *recipe(files, per_device_batch_size=micro), env=env)
    assert len(run.losses()) == STEPS
    assert kit.distance(whole.weights, run.weights) <= tolerance  # world 3: DDP divides by 3 in float32
    worst = max(abs(a - b) / abs(a) for a, b in zip(whole.losses(), run.losses(), strict=True))
    assert worst <= max(1e-9, tolerance)
    assert [line["weight"] for line in run.kind("train")] == [line["weight"] for line in whole.kind("train")]


def _naive_gradient(backend, module, step_batch, totals):
    """The mutant: the mean of the micro-batches' means, as most loops have it."""
    total = torch.zeros((), dtype=torch.float64)
    for micro, batch in step_batch:
        with nullcontext() if micro.last else backend.accelerator.no_sync(module):
            loss = module(batch.inputs)["loss"]
            backend.accelerator.backward(loss / max(batch.weight, 1) / len(step_batch))
        if not micro.dummy:
            total += loss.detach()
    return StepLosses(total[None], {})


def test_mutant_mean_of_means_is_caught(files, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "compute_gradient", _naive_gradient)
    run = kit.run_training(2, tmp_path / "run", *recipe(files, per_device_batch_size=4))
    assert kit.distance(whole.weights, run.weights) > 1e-4


DROPOUT = {"model": "gpt2.yaml", "per_device_batch_size": 4, "max_steps": 20}


@pytest.fixture(scope="module")
def one_process_with_dropout(files, tmp_path_factory):
    return kit.run_training(1, tmp_path_factory.mktemp("dropout") / "one", *recipe(files, **DROPOUT))


@pytest.mark.parametrize("world, mutant", [(2, False), (4, False), (2, True)])
def test_dropout_masks_do_not_depend_on_the_split(
    files, one_process_with_dropout, tmp_path, monkeypatch, world, mutant
):
    """The mutant draws without the seed of the micro-batch."""
    if mutant:
        monkeypatch.setattr(seeding, "seed_everything", lambda seed: None)
    run = kit.run_training(world, tmp_path / "run", *recipe(files, **DROPOUT))
    difference = kit.distance(one_process_with_dropout.weights, run.weights)
    assert difference > 1e-3 if mutant else difference <= 1e-10
