"""Learning rates: schedules as functions of completed updates, warmup, and their speed on several processes."""

import pytest
import torch

from src.config.addons import addon_names
from src.config.errors import UsageError
from src.config.schema import SCHEDULES, RunConfig
from src.training.schedules import make_schedule
from tests.helpers import kit

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


@pytest.mark.parametrize("name, kwargs", [("cosine", {"nonsense": 1}), ("constant", {"min_lr": 1})])
def test_wrong_arguments_of_a_schedule_are_refused(name, kwargs):
    with pytest.raises(UsageError, match="lr_scheduler_kwargs"):
        make_schedule(RunConfig(lr_scheduler_type=name, lr_scheduler_kwargs=kwargs), 10)


# ---- arguments, and a warmup from a value -------------------------------------------------------------------------------


def rates(name: str, total: int = 40, warmup: int = 4, peak: float = 2.0, **kwargs) -> list[float]:
    cfg = RunConfig(learning_rate=peak, lr_scheduler_type=name, warmup_steps=warmup, lr_scheduler_kwargs=kwargs)
    schedule = make_schedule(cfg, total)
    return [schedule(update) for update in range(total)]


@pytest.mark.parametrize("name", ["cosine", "warmup_stable_decay"])
def test_warmup_from_a_value(name):
    cfg = RunConfig(learning_rate=2.0, lr_scheduler_type=name, warmup_steps=4, warmup_start_lr=1.0)
    schedule, from_zero = make_schedule(cfg, 40), rates(name)
    assert [schedule(u) for u in range(5)] == pytest.approx([1.0, 1.25, 1.5, 1.75, 2.0])
    assert [schedule(u) for u in range(4, 40)] == from_zero[4:]


# ---- on several processes ----------------------------------------------------------------------------------------------


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
