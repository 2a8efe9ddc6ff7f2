"""Learning rates: schedules as functions of completed updates, and warmup."""

import pytest
import torch

from engine.config.errors import UsageError
from engine.config.find_addons import addon_names
from engine.config.run_config import SCHEDULES, RunConfig
from src.training.schedules import make_schedule
from tests.helpers.schedules import rates

TRANSFORMERS = [name for name in SCHEDULES if name not in addon_names("schedules")]


@pytest.mark.parametrize("name", TRANSFORMERS)
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


def test_warmup_as_a_fraction_of_all_steps():
    fraction = make_schedule(RunConfig(warmup_steps=0.1, learning_rate=1.0), 50)
    steps = make_schedule(RunConfig(warmup_steps=5, learning_rate=1.0), 50)
    assert [fraction(u) for u in range(50)] == [steps(u) for u in range(50)]
    assert fraction(0) == 0
    assert fraction(5) == 1


def test_arguments_that_transformers_would_ignore_are_refused():
    with pytest.raises(UsageError, match="lr_scheduler_kwargs"):
        make_schedule(RunConfig(lr_scheduler_type="constant", lr_scheduler_kwargs={"min_lr": 1}), 10)


@pytest.mark.parametrize("name", ["cosine", "warmup_stable_decay"])
def test_warmup_from_a_value(name):
    cfg = RunConfig(learning_rate=2.0, lr_scheduler_type=name, warmup_steps=4, warmup_start_lr=1.0)
    schedule = make_schedule(cfg, 40)
    assert [schedule(u) for u in range(5)] == pytest.approx([1.0, 1.25, 1.5, 1.75, 2.0])
    assert [schedule(u) for u in range(4, 40)] == rates(name)[4:]
