"""A trainable parameter that the loss does not use: refused by DDP in that step, or exact on any number of processes."""

from functools import partialmethod

import pytest
import torch
from accelerate import Accelerator

import train
from engine.distributed.backends import Backend
from tests.helpers import classifier_task, kit, routed_model

ALLOW = ["--ddp_find_unused_parameters", "true"]
SGD = ["--optim", "sgd", "--adam_beta1", "0", "--weight_decay", "0"]  # a gradient of zero and none are the same update


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module", autouse=True)
def routed():
    with classifier_task.registered(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(classifier_task.Task, "build", routed_model.build)
        yield


@pytest.fixture(scope="module")
def one(folder, tmp_path_factory):
    return kit.run_training(1, tmp_path_factory.mktemp("one") / "run", *routed_model.recipe(folder))


def command(folder, here, *flags, **fields):
    argv = [*routed_model.recipe(folder, **fields), *flags, "--output_dir", "run"]
    return kit.run_command("train.py", *argv, folder=here, world=2)


# ---- parameters that only some rows use --------------------------------------------------------------------------------


def test_experts_of_some_rows_are_exact_on_any_number_of_processes(folder, one, tmp_path):
    run = kit.run_training(3, tmp_path / "run", *routed_model.recipe(folder), *ALLOW)
    assert kit.distance(one.weights, run.weights) <= 1e-10


def test_mutant_zero_instead_of_no_gradient_is_caught(folder, one, tmp_path, monkeypatch):
    """An expert that no row of a step uses would move by its moments and its weight decay."""
    gradient = train.compute_gradient

    def zeros(backend, module, *rest):
        losses = gradient(backend, module, *rest)
        for parameter in (backend.parameters[name] for name in backend.trainable):
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return losses

    monkeypatch.setattr(train, "compute_gradient", zeros)
    run = kit.run_training(2, tmp_path / "run", *routed_model.recipe(folder), *ALLOW)
    assert kit.distance(one.weights, run.weights) > 1e-3


def test_mutant_gradients_of_the_last_micro_batch_only_are_caught(folder, one, tmp_path, monkeypatch):
    """Each rank loses the gradient of an expert that its last micro-batch does not use, but an earlier one does."""
    backward, no_sync, is_last = Accelerator.backward, Backend.no_sync, [False]

    def noting(self, module, unless):
        is_last[0] = unless
        self.accelerator.trained = [self.parameters[name] for name in self.trainable]
        return no_sync(self, module, unless)

    def losing(self, loss):
        gradients = torch.autograd.grad(loss, self.trained, retain_graph=True, allow_unused=True)
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            if is_last[0] and gradient is None and parameter.grad is not None:
                parameter.grad.zero_()
        backward(self, loss)

    monkeypatch.setattr(Backend, "no_sync", noting)
    monkeypatch.setattr(Accelerator, "backward", losing)
    run = kit.run_training(2, tmp_path / "run", *routed_model.recipe(folder), *ALLOW)
    assert kit.distance(one.weights, run.weights) > 1e-3


@pytest.mark.cluster
def test_fsdp2_with_experts_that_differ_between_ranks(folder, tmp_path):
    """FSDP2 needs no field: every rank reduces all parameters of a layer."""
    env = kit.where("fsdp2", 2, mixed_precision="no")
    alone = kit.run_training(1, tmp_path / "one", *routed_model.recipe(folder), *SGD)
    run = kit.run_training(2, tmp_path / "two", *routed_model.recipe(folder), *SGD, env=env)
    assert kit.distance(alone.weights, run.weights) <= 1e-10


# ---- parameters that no row uses ---------------------------------------------------------------------------------------


def test_an_unused_parameter_is_refused_under_ddp(folder, tmp_path, monkeypatch):
    options = {"dense": True, "frozen": ("experts.1", "experts.2", "experts.3", "experts.4")}
    monkeypatch.setattr(classifier_task.Task, "build", partialmethod(routed_model.build, **options))
    codes, texts = command(folder, tmp_path / "two", max_steps=1)  # in the step itself, not in the next one
    assert codes == [2, 2], texts
    last = texts[0].rstrip().splitlines()[-1]
    assert all(word in last for word in ("spare.weight", "spare.bias", "ddp_find_unused_parameters"))
    assert "Traceback" not in "".join(texts)
    codes, texts = command(folder, tmp_path / "allowed", *ALLOW, max_steps=3)
    assert codes == [0, 0], texts


# ---- frozen or unfrozen during training --------------------------------------------------------------------------------


def test_unfreezing_during_training_is_refused(folder, tmp_path, monkeypatch):
    update = train.optimizer_step

    def freezing(backend, module, *rest):
        for name, parameter in module.named_parameters():
            if name.endswith("spare.weight"):
                parameter.requires_grad_(True)
        return update(backend, module, *rest)

    monkeypatch.setattr(train, "optimizer_step", freezing)
    codes, texts = command(folder, tmp_path, *ALLOW)
    assert codes == [2, 2], texts
    assert "spare.weight" in texts[0]
    assert "--init_from" in texts[0]
