"""Suggest a learning rate for a run file: make find-lr CONFIG=configs/stdlib_lm.yaml

A range test (Smith 2017, fastai's lr_find): the run's first steps with a growing learning rate. It writes nothing but
--curve FILE. Tests: tests/addons/tools/test_find_lr.py.
"""

import argparse
import json
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import src

if __name__ == "__main__":
    src.begin(has_help=False)  # before the slow imports below: Ctrl-C ends it at once

# isort: split
from src.checkpointing.locate_weights import init_weights
from src.config import parsing, validation
from src.config.errors import UsageError
from src.config.fields import AS_GIVEN, declared_options, option, read_words
from src.data import data_loader, dataset
from src.distributed import backends
from src.distributed.init_accelerator import check_environment, init_accelerator, shutdown
from src.reporting.environment import topology
from src.runtime import console
from src.runtime.exit_codes import run_main
from src.storage import atomic_folder
from src.storage.jsonl import strict_json
from src.tasks import OPTIONS, Task, make_task
from src.training import optimizers, schedules
from src.training.meter import StepTotals
from src.training.techniques import make_techniques
from src.training.train_state import Run
from src.training.training_model import build_model
from train import compute_gradient, optimizer_step

DIVERGED = 3  # a loss that is this many times its whole fall above the lowest one; fastai stops at 4 × the lowest


@dataclass
class RangeTest:
    """The flags beside those of train.py."""

    start_lr: float = option("learning rate of the first update", 1e-7, above=0)
    end_lr: float = option("learning rate of the last update, unless the loss diverges before", 10.0, above=0)
    updates: int = option("updates; the learning rate grows by the same factor in each", 100, min=20, max=5000)
    curve: str | None = option("write the numbers of the curve to this JSON file", is_path=AS_GIVEN)

    def rate(self, update: int) -> float:
        """Return the learning rate of an update, counted from 0."""
        return self.start_lr * (self.end_lr / self.start_lr) ** (update / (self.updates - 1))


@dataclass
class Result:
    """What a range test found: one rate and one loss of the global batch an update."""

    rates: list[float]
    losses: list[float]
    smooth: list[float]  # the finite losses without the noise of single batches
    suggestion: float | None
    reason: str


def main(argv: list[str]) -> None:
    test, argv = own_flags(parsing.with_default_config(argv))
    cfg, task_options = parsing.parse(argv, OPTIONS)
    validation.check(cfg, task_options)
    if cfg.dry_run:
        raise UsageError("dry_run: find_lr.py has no dry_run: give --dry_run to train.py")
    check_environment()
    cfg = replace(cfg, report_to=[])  # no tracker
    task = make_task(cfg, task_options)
    datasets = dataset.prepare_datasets(cfg, task, wanted=("train",))
    accelerator = init_accelerator(cfg)
    find(test, cfg, task, datasets, accelerator)
    shutdown(accelerator)  # now nothing may refer to the model


def own_flags(argv: list[str]) -> tuple[RangeTest, list[str]]:
    """Return (the flags of the range test, the other words of `argv`). Raise UsageError for an invalid value."""
    parser = argparse.ArgumentParser(allow_abbrev=False, epilog="and all flags of train.py")
    for name, rules in declared_options(RangeTest).items():
        parser.add_argument(f"--{name}", nargs="*", help=rules.help.replace("%", "%%"))
    flags, rest = parser.parse_known_args(argv)
    given = {name: words for name, words in vars(flags).items() if words is not None}
    try:
        test = RangeTest(**{name: read_words(RangeTest, name, words) for name, words in given.items()})
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    if test.start_lr >= test.end_lr:
        raise UsageError(f"start_lr is {test.start_lr}: it must be below end_lr, which is {test.end_lr}")
    return test, rest


def find(test: RangeTest, cfg: parsing.RunConfig, task: Task, datasets: dict, accelerator) -> None:
    """Run the test on all ranks, and print its result on one."""
    dataset.check_same_data(datasets)
    backend = backends.make_backend(accelerator, cfg)
    outcome = run_test(test, cfg, task, datasets["train"], backend)
    if accelerator.is_main_process:
        report(test, cfg, backend, outcome)


def run_test(test: RangeTest, cfg: parsing.RunConfig, task: Task, train_set, backend: backends.Backend) -> Result:
    """Train as train.py does from step 1, but with the rates of `test`, until the loss diverges."""
    techniques = make_techniques(cfg)
    model = build_model(cfg, backend, task, train_set, init_weights(cfg, task), techniques.change_model)
    optimizer = optimizers.make_optimizer(cfg, model, backend.can_fuse_optimizer)
    module, optimizer = backend.prepare(model, optimizer)
    num_steps = schedules.total_steps(cfg, train_set.stats["examples"])
    run = Run(cfg, backend, task, {"train": train_set}, model, module, optimizer, num_steps)
    state = run.state
    techniques.begin(run)
    gradient = techniques.wrap_gradient(backend.wrap_gradient(task.wrap_gradient(compute_gradient)))
    batches = data_loader.train_batches(cfg, backend, task, train_set, state, test.updates)
    progress = console.Progress("range test", test.updates, "updates", backend.accelerator.is_main_process)
    rates, losses = [], []
    module.train()
    while state.step < test.updates and not (losses and has_diverged(losses)):
        batch, _ = next(batches)
        totals = StepTotals.sum_over_ranks(backend, batch, {})
        rate = test.rate(state.step)
        state.step += 1
        progress.update()
        if not totals.weight:
            continue
        batch = backend.pad_with_dummy_batches(batch, totals.forwards)
        step_losses = gradient(backend, module, batch, totals)
        state.finish_update(test.updates + 1)  # skipped updates are not an error here
        state.learning_rate = rate
        techniques.change_gradient()
        norm, skipped = optimizer_step(backend, module, optimizer, rate, cfg.max_grad_norm)
        state.add_update(norm, skipped, batch, step_losses)
        techniques.after_update(skipped)
        # This waits for the device in every step: ranks must stop together, and before the weights are far off.
        losses.append(backend.hosts.sum([float(step_losses.losses.sum())])[0].item() / totals.weight)
        rates.append(rate)
    if not losses:
        raise UsageError(f"no target in the first {test.updates} global batches of the training data")
    return result(test, rates, losses)


def report(test: RangeTest, cfg: parsing.RunConfig, backend: backends.Backend, outcome: Result) -> None:
    """Print the curve and the suggestion; with --curve FILE, draw it and write its numbers."""
    print(console.table(topology(backend, cfg)) + "\n\n  learning rate   smoothed loss")
    low, high = min(outcome.smooth), max(outcome.smooth[0], min(outcome.smooth))
    for i in range(0, len(outcome.smooth), max(1, len(outcome.smooth) // 20)):
        share = (outcome.smooth[i] - low) / (high - low) if high > low else 0.0
        print(f"        {outcome.rates[i]:.1e}  {outcome.smooth[i]:>14,.4f}  {'#' * round(40 * min(1.0, share))}")
    if outcome.suggestion is None:
        print(f"\nno suggestion: {outcome.reason}")
    else:
        print(f"\nsuggestion: --learning_rate {outcome.suggestion:g} ({outcome.reason})")
    print(f"The run file has learning_rate {cfg.learning_rate:g}. Nothing was saved.")
    if test.curve:
        numbers = {"suggestion": outcome.suggestion, "reason": outcome.reason, "learning_rate": outcome.rates}
        numbers |= {"loss": outcome.losses, "smoothed_loss": outcome.smooth}
        atomic_folder.rewrite(Path(test.curve), json.dumps(strict_json(numbers)) + "\n")


# ---- what the losses suggest -----------------------------------------------------------------------------------------


def smoothed(losses: list[float], width: int) -> list[float]:
    """Return the median of the `2 * width + 1` losses around each loss.

    An average over past losses, as in fastai, would move the curve to higher rates; one around each loss would carry
    the losses of a divergence to lower ones."""
    return [median(losses[max(0, i - width) : i + width + 1]) for i in range(len(losses))]


def has_diverged(losses: list[float]) -> bool:
    """Return whether the last loss is not finite, or the last three are far above the lowest of the test."""
    if not math.isfinite(losses[-1]):
        return True
    recent = smoothed(losses, 1)
    lowest = min(recent)
    return median(losses[-3:]) > lowest + DIVERGED * max(abs(lowest), recent[0] - lowest)


def result(test: RangeTest, rates: list[float], losses: list[float]) -> Result:
    """Return what these losses suggest: a tenth of the rate with the lowest smoothed loss, if the loss has fallen."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    width = max(1, test.updates // 30)
    smooth = smoothed(finite, width) or [math.nan]
    low = smooth.index(min(smooth))
    # Of single batches, as the median difference between two in a row. The range of a smoothed noise without any fall
    # exceeds 7 times that of its median in 1 to 2 % of tests.
    noise = median([abs(b - a) for a, b in pairwise(finite)] or [0.0])
    fall = smooth[0] - smooth[low]
    stopped = has_diverged(losses)
    end = f"it diverged at {rates[-1]:.1e}" if stopped else f"it did not diverge up to {rates[-1]:.1e}"
    if not fall > 7 * noise / math.sqrt(2 * width + 1):
        text = f"the loss never fell by more than the noise between batches ({smooth[0]:.4g} at the start, "
        text += f"{smooth[low]:.4g} at the lowest, steps of {noise:.2g} between batches); {end}. "
        text += f"Give a lower --start_lr ({test.start_lr:g})" if stopped else f"Give more --updates ({test.updates})"
        return Result(rates, losses, smooth, None, text)
    steepest = min(range(width, len(smooth)), key=lambda i: smooth[i] - smooth[i - width])
    reason = f"a tenth of {rates[low]:.1e}, where the smoothed loss was lowest ({smooth[low]:.4g}); it fell fastest at "
    reason += f"{rates[steepest]:.1e}, and {end}"
    if low > len(smooth) - 2 - width and not stopped:
        reason += ": the loss was still falling, so a higher --end_lr may find more"
    return Result(rates, losses, smooth, float(f"{rates[low] / 10:.1e}"), reason)


if __name__ == "__main__":
    run_main(main)
