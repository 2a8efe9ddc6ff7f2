"""Decay groups, fused kernels, and the learning rate as a function of completed updates."""

import pytest
import torch

from src.config.errors import UsageError
from src.config.schema import SCHEDULES, RunConfig
from src.training.optimizers import make_optimizer, parameter_groups
from src.training.schedules import make_schedule
from tests.helpers import kit


def small_model():
    model = torch.nn.Sequential(
        torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3)
    )
    model[3].weight.requires_grad_(False)
    return model


def test_weight_decay_on_two_dimensions_or_more():
    model = small_model()
    decayed, plain = parameter_groups(model, 0.1)
    assert [id(p) for p in decayed["params"]] == [id(model[0].weight), id(model[1].weight)]
    assert [id(p) for p in plain["params"]] == [
        id(p) for p in (model[1].bias, model[2].weight, model[2].bias, model[3].bias)
    ]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def test_a_frozen_parameter_does_not_move():
    model = small_model()
    optimizer = make_optimizer(RunConfig(learning_rate=0.1, weight_decay=0.5), model)
    before = model[3].weight.clone()
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert torch.equal(model[3].weight, before)
    assert all(group["fused"] for group in optimizer.param_groups)


def test_nothing_to_train_is_refused():
    model = small_model().requires_grad_(False)
    with pytest.raises(UsageError, match="trainable"):
        make_optimizer(RunConfig(), model)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_those_of_transformers_at_the_number_of_updates(name):
    from transformers import get_scheduler

    kwargs = {"cosine_with_min_lr": {"min_lr": 1e-5}, "warmup_stable_decay": {"num_decay_steps": 8}}.get(name, {})
    run = RunConfig(learning_rate=1e-3, lr_scheduler_type=name, warmup_steps=4, lr_scheduler_kwargs=kwargs)
    ours = make_schedule(run, 40)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
    theirs = get_scheduler(name, optimizer, num_warmup_steps=4, num_training_steps=40, scheduler_specific_kwargs=kwargs)
    for update in range(40):
        assert ours(update) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("total", [1, 2, 6])
def test_warmup_longer_than_the_run(name, total):
    kwargs = {"cosine_with_min_lr": {"min_lr": 1e-5}}.get(name, {})
    long, whole = (
        make_schedule(RunConfig(lr_scheduler_type=name, warmup_steps=steps, lr_scheduler_kwargs=kwargs), total)
        for steps in (50, total)
    )
    assert [long(update) for update in range(total)] == [whole(update) for update in range(total)]
    assert long(0) == (RunConfig.learning_rate if name == "constant" else 0)


def test_warmup_as_a_fraction_of_all_steps():
    fraction = make_schedule(RunConfig(warmup_steps=0.1, learning_rate=1.0), 50)
    steps = make_schedule(RunConfig(warmup_steps=5, learning_rate=1.0), 50)
    assert [fraction(u) for u in range(50)] == [steps(u) for u in range(50)]
    assert fraction(0) == 0
    assert fraction(5) == 1


def test_wrong_arguments_of_a_schedule_are_refused():
    with pytest.raises(UsageError, match="lr_scheduler_kwargs"):
        make_schedule(RunConfig(lr_scheduler_kwargs={"nonsense": 1}), 10)


def test_the_learning_rate_does_not_run_faster_on_two_processes(files, tmp_path):
    """A schedule that Accelerate prepares is stepped once per process; the mutant below does so."""
    fields = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl"}
    flags = kit.flags(**fields, max_steps=10, logging_steps=1, learning_rate=1)
    traces = []
    for world in (1, 2):
        run = kit.run_training(world, tmp_path / f"{world}", *flags)
        traces.append([line["learning_rate"] for line in run.kind("train")])
    assert traces[0] == traces[1] == pytest.approx([1 - s / 10 for s in range(10)])


def _prepared_schedule():
    """Return the rates of a script that prepares its scheduler with Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.0, 1 - s / 10))
    optimizer, schedule = accelerator.prepare(optimizer, schedule)
    rates = []
    for _ in range(10):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


def test_mutant_prepared_schedule_ends_halfway(tmp_path):
    rates = kit.spawn(2, _prepared_schedule, out=tmp_path)[0]
    assert rates[5:] == [0.0] * 5
