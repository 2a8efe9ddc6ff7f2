"""Learning rates: schedules as functions of completed updates, warmup, and their speed on several processes."""

import math
import shutil

import pytest
import torch

from src.config import parsing, validation
from src.config.errors import UsageError
from src.config.schema import SCHEDULES, RunConfig
from src.tasks import OPTIONS
from src.training.schedules import OWN_SCHEDULES, PLATEAU, make_schedule
from tests.helpers import kit

TRANSFORMERS = [name for name in SCHEDULES if name not in OWN_SCHEDULES and name != PLATEAU]


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


def test_warmup_that_a_constant_rate_ignores_is_warned_of(capsys):
    fields = {"warmup_steps": 5, "model_config": "m.yaml", "train_file": "x"}
    validation.check(*parsing.parse(kit.flags(**fields, lr_scheduler_type="constant_with_warmup"), OPTIONS))
    assert not capsys.readouterr().err
    validation.check(*parsing.parse(kit.flags(**fields, lr_scheduler_type="constant"), OPTIONS))
    assert "warning: warmup_steps 5 is ignored" in capsys.readouterr().err


def test_wrong_arguments_of_a_schedule_are_refused():
    with pytest.raises(UsageError, match="lr_scheduler_kwargs"):
        make_schedule(RunConfig(lr_scheduler_kwargs={"nonsense": 1}), 10)


@pytest.mark.parametrize("name", ["constant", "constant_with_warmup"])
def test_a_constant_schedule_takes_no_arguments(name):
    with pytest.raises(UsageError, match=f"lr_scheduler_kwargs: .*not valid for {name}: it takes no arguments"):
        make_schedule(RunConfig(lr_scheduler_type=name, lr_scheduler_kwargs={"min_lr": 1}), 10)


# ---- schedules of src/training/schedules.py ----------------------------------------------------------------------------


def rates(name: str, total: int = 40, warmup: int = 4, peak: float = 2.0, **kwargs) -> list[float]:
    cfg = RunConfig(learning_rate=peak, lr_scheduler_type=name, warmup_steps=warmup, lr_scheduler_kwargs=kwargs)
    schedule = make_schedule(cfg, total)
    return [schedule(update) for update in range(total)]


def half_cosine(begin: float, end: float, x: float) -> float:
    return end + (begin - end) * 0.5 * (1 + math.cos(math.pi * x))


def test_flat_cos_is_flat_and_then_a_cosine():
    found = rates("flat_cos", total=100, warmup=0, flat=0.75, min_lr_rate=0.1)
    assert found[:75] == [2.0] * 75
    assert found[75:] == pytest.approx([2 * half_cosine(1, 0.1, u / 25) for u in range(25)])


def test_one_cycle_equals_that_of_torch():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    torch_one = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2.0, total_steps=41, pct_start=0.275, div_factor=25, final_div_factor=4, cycle_momentum=False
    )
    expected = []
    for _ in range(40):  # torch: the peak at update 0.275 × 41 − 1, the end at the last update
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        torch_one.step()
    peak = 0.275 * 41 - 1
    found = rates("one_cycle", total=40, warmup=0, rise=peak / 40, start=1 / 25, end=1 / 100)
    assert found == pytest.approx(expected, rel=1e-9)


def test_restarts_return_to_the_peak_and_keep_the_minimum():
    found = rates("cosine_restarts_min", total=34, warmup=4, num_cycles=3, min_lr_rate=0.25)
    assert found[:5] == pytest.approx([0, 0.5, 1.0, 1.5, 2.0])
    assert [found[4], found[14], found[24]] == [2.0] * 3
    assert min(found[4:]) == pytest.approx(2 * half_cosine(1, 0.25, 0.9))


@pytest.mark.parametrize("name", ["cosine", "flat_cos", "warmup_stable_decay"])
def test_warmup_from_a_value(name):
    cfg = RunConfig(learning_rate=2.0, lr_scheduler_type=name, warmup_steps=4, warmup_start_lr=1.0)
    schedule, from_zero = make_schedule(cfg, 40), rates(name)
    assert [schedule(u) for u in range(5)] == pytest.approx([1.0, 1.25, 1.5, 1.75, 2.0])
    assert [schedule(u) for u in range(4, 40)] == from_zero[4:]


@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
def test_every_decay_of_warmup_stable_decay(shape):
    found = rates("warmup_stable_decay", num_decay_steps=10, decay_type=shape)
    progress = {"linear": lambda x: 1 - x, "cosine": lambda x: half_cosine(1, 0, x), "1-sqrt": lambda x: 1 - x**0.5}
    assert found[4:30] == [2.0] * 26
    assert found[30:] == pytest.approx([2 * progress[shape](i / 10) for i in range(10)])


@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
def test_every_warmup_and_the_minimum_of_warmup_stable_decay(shape):
    found = rates("warmup_stable_decay", num_decay_steps=10, warmup_type=shape, min_lr_ratio=0.25)
    rise = {"linear": lambda x: x, "cosine": lambda x: half_cosine(0, 1, x), "1-sqrt": lambda x: 1 - (1 - x) ** 0.5}
    assert found[:4] == pytest.approx([2 * (0.25 + 0.75 * rise[shape](u / 4)) for u in range(4)])
    assert found[30:] == pytest.approx([2 * half_cosine(1, 0.25, u / 10) for u in range(10)])


def test_polynomial_to_an_end():
    found = rates("polynomial", lr_end=0.5, power=2.0)
    assert found[4:] == pytest.approx([0.5 + 1.5 * (1 - u / 36) ** 2 for u in range(36)])


def test_a_schedule_of_your_own_is_one_function_and_one_line(monkeypatch):
    assert set(OWN_SCHEDULES) < set(SCHEDULES)  # the names that the run file accepts follow from the line
    monkeypatch.setitem(OWN_SCHEDULES, "root", lambda x, end=0.0: max(end, 1 - x**0.5))
    assert rates("root", end=0.5)[4:] == pytest.approx([2 * max(0.5, 1 - (u / 36) ** 0.5) for u in range(36)])


@pytest.mark.parametrize("name", OWN_SCHEDULES)
def test_wrong_arguments_of_an_own_schedule_are_refused(name):
    with pytest.raises(UsageError, match="lr_scheduler_kwargs"):
        rates(name, nonsense=1)


# ---- reduce_lr_on_plateau ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plateau(tmp_path_factory):
    """Flags of a run with an accuracy that stops improving several times, and the run on two processes."""
    folder = tmp_path_factory.mktemp("plateau")
    fields = {"lr_scheduler_type": PLATEAU, "metric_for_best_model": "accuracy", "dtype": "float64"}
    fields |= {"lr_scheduler_kwargs": '{"factor": 0.5, "patience": 1, "cooldown": 1, "min_lr": 0.02}'}
    fields |= {"learning_rate": 0.1, "warmup_steps": 3, "max_steps": 24, "logging_steps": 1, "eval_steps": 1}
    fields |= {"save_steps": 4, "save_total_limit": 99, "global_batch_size": 8, "per_device_batch_size": 4}
    flags = kit.flags(**kit.tiny_files(folder), **fields)
    return flags, kit.run_training(2, folder / "run", *flags)


def plateau_rates(accuracies: list[float], mode: str) -> list[float]:
    """Return the rates of torch's scheduler, times the warmup, for an evaluation after each of the steps."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode=mode, factor=0.5, patience=1, cooldown=1, min_lr=0.02
    )
    expected = []
    for step, accuracy in enumerate(accuracies):
        expected.append(optimizer.param_groups[0]["lr"] * min(1.0, step / 3))
        scheduler.step(accuracy)
    return expected


def test_plateau_equals_that_of_torch_and_follows_the_metric(plateau):
    _, run = plateau
    accuracies = [line["accuracy"] for line in run.kind("eval")]
    found = [line["learning_rate"] for line in run.kind("train")]
    assert len(accuracies) == len(found) == 24
    assert found == pytest.approx(plateau_rates(accuracies, "max"), rel=1e-12)
    assert found[-1] == pytest.approx(0.02)  # min_lr
    assert found != pytest.approx(plateau_rates(accuracies, "min"), rel=1e-3)  # the mutant: the direction of a loss


def test_plateau_after_a_resume(plateau, tmp_path):
    flags, run = plateau
    shutil.copytree(run.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "final")
    for step in (12, 16, 20, 24):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{step:08d}")
    resumed = kit.run_training(1, tmp_path / "run", *flags)
    assert [line["learning_rate"] for line in resumed.kind("train")] == [
        line["learning_rate"] for line in run.kind("train")
    ]
    assert kit.distance(resumed.weights, run.weights) <= 1e-10


def test_plateau_without_evaluations_is_refused():
    with pytest.raises(UsageError, match="eval_steps"):
        validation.check(
            *parsing.parse(kit.flags(lr_scheduler_type=PLATEAU, model_config="m.yaml", train_file="x"), OPTIONS)
        )


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
