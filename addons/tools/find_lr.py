# Needs addons/schedules/range_test.py.
"""Suggest a learning rate for a run file: make find-lr CONFIG=configs/stdlib_lm.yaml

A range test (Smith 2017, fastai's lr_find): train.py trains the first steps of the run with the schedule range_test, and
the losses in its metrics.jsonl tell the rate. Only --curve FILE is kept. Tests: tests/addons/tools/test_find_lr.py.
"""

import argparse
import json
import math
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NoReturn

from engine import startup

if __name__ == "__main__":
    startup.begin(has_help=False)  # before the slow imports below: Ctrl-C ends it at once

# isort: split
import train
from engine.checkpointing.checkpointer import Checkpointer
from engine.config import parsing, validation
from engine.config.addresses import local_folder
from engine.config.errors import Failure, Stopped, UsageError, list_errors
from engine.config.option import AS_GIVEN, declared_options, option, read_values, value_of_words
from engine.distributed import stop_signals
from engine.distributed.init_accelerator import check_environment, init_accelerator, shutdown
from engine.find_tasks import OPTIONS, make_task
from engine.plan import dataset
from engine.process import run_lock
from engine.process.exit_codes import run_main
from engine.storage import atomic_folder, jsonl
from engine.storage.jsonl import strict_json

DIVERGED = 3  # a loss that is this many times its whole fall above the lowest one; fastai stops at 4 × the lowest


@dataclass
class RangeTest:
    """The flags beside those of train.py."""

    start_lr: float = option("learning rate of the first update", 1e-7, above=0)
    end_lr: float = option("learning rate towards which the updates rise", 10.0, above=0)
    updates: int = option("updates; the learning rate grows by the same factor in each", 100, min=20, max=5000)
    curve: str | None = option("write the numbers of the curve to this JSON file", is_path=AS_GIVEN)

    def fields(self, folder: str) -> dict:
        """Return the fields of the run that differ from the run file."""
        schedule = {
            "lr_scheduler_type": "range_test",
            "lr_scheduler_kwargs": {"min_lr_rate": self.start_lr / self.end_lr},
        }
        off = dict.fromkeys(("eval_steps", "metric_for_best_model", "greater_is_better", "early_stopping_patience"))
        off |= {"warmup_steps": 0.0, "warmup_start_lr": 0.0, "report_to": [], "profile_steps": []}
        off |= {"max_skipped_steps": self.updates + 1}  # skipped updates are not an error here
        run = {"output_dir": folder, "resume": "never", "logging_steps": 1, "max_steps": self.updates}
        return run | schedule | off | {"learning_rate": self.end_lr}


@dataclass
class Result:
    """What a range test found: one rate and one loss of the global batch an update."""

    rates: list[float]
    losses: list[float]
    smooth: list[float]  # the finite losses without the noise of single batches
    suggestion: float | None
    reason: str


class Ended(Exception):
    """Ends the test on all ranks between two steps, with the loss diverged or after the last one."""


class NoCheckpoints(Checkpointer):
    """Neither checkpoints nor final/; the run ends where its loss diverges."""

    def failed(self) -> float:
        """Return 1 on the main process if the loss has diverged, else 0; each step's all-reduce sums this."""
        return float(self.is_main and diverged_at(read(self.folder)[1]) is not None)

    def after_step(self) -> None:
        """Reserve no memory for saves."""

    def save(self) -> None:
        """Save nothing."""

    def stop(self, error: UsageError | Failure | None = None) -> NoReturn:
        """Raise `error`, else Stopped after a signal on any rank, else Ended."""
        reasons = self.hosts.union({self.signals.reason} if self.signals.reason else set())
        stopped = Stopped(f"Stopped by {' and '.join(reasons)}: the range test has no result.")
        raise error or (stopped if reasons else Ended())

    def write_final(self) -> NoReturn:
        """Raise Ended: a summary would name a model."""
        raise Ended


def main(argv: list[str]) -> None:
    stop_signals.exit_on_signal()
    test, argv = own_flags(parsing.with_default_config(argv))
    cfg, task_options = parsing.parse(argv, OPTIONS)
    if cfg.dry_run:
        raise UsageError("dry_run: find_lr.py has no dry_run: give --dry_run to train.py")
    given, folder = cfg.learning_rate, Path(f"{local_folder(cfg.output_dir)}_find_lr")
    cfg = replace(cfg, **test.fields(str(folder)))
    validation.check(cfg, task_options)
    check_environment()
    task = make_task(cfg, task_options)
    datasets = dataset.prepare_datasets(cfg, task, wanted=("train",))  # nothing to evaluate
    accelerator = init_accelerator(cfg)
    is_main = accelerator.is_main_process
    try:
        with suppress(Ended):
            train.train(cfg, task, datasets, accelerator, NoCheckpoints)
        shutdown(accelerator)  # now nothing may refer to the model
        if is_main:
            report(test, result(test, *read(folder)), given)
    finally:
        if is_main and run_lock.is_mine(folder):  # another test may be running there
            shutil.rmtree(folder, ignore_errors=True)


def own_flags(argv: list[str]) -> tuple[RangeTest, list[str]]:
    """Return (the flags of the range test, the other words of `argv`). Raise UsageError for an invalid value."""
    parser = argparse.ArgumentParser(allow_abbrev=False, epilog="and all flags of train.py")
    options = declared_options(RangeTest)
    for name, rules in options.items():
        parser.add_argument(f"--{name}", nargs="*", help=rules.help.replace("%", "%%"))
    flags, rest = parser.parse_known_args(argv)
    given = {name: words for name, words in vars(flags).items() if words is not None}
    words_as_values = {name: value_of_words(options[name].type, words) for name, words in given.items()}
    values, errors = read_values(words_as_values, options)
    if errors:
        raise UsageError(list_errors([f"--{sentence}" for sentence in errors.values()]))
    test = RangeTest(**values)
    if test.start_lr >= test.end_lr:
        raise UsageError(f"start_lr is {test.start_lr}: it must be below end_lr, which is {test.end_lr}")
    return test, rest


def read(folder: Path) -> tuple[list[float], list[float]]:
    """Return (learning rates, losses) of the updates in metrics.jsonl; NaN for a loss that is not finite."""
    lines = [line for line in jsonl.read_lines(folder / "metrics.jsonl") if line["kind"] == "train"]
    lines = [line for line in lines if line["weight"]]  # 0: no target in the global batch, so no update
    losses = [math.nan if line["loss"] is None else line["loss"] for line in lines]
    return [line["learning_rate"] for line in lines], losses


def report(test: RangeTest, outcome: Result, given: float) -> None:
    """Print the curve and the suggestion; with --curve FILE, draw it and write its numbers."""
    print("\n  learning rate   smoothed loss")
    low, high = min(outcome.smooth), max(outcome.smooth[0], min(outcome.smooth))
    for i in range(0, len(outcome.smooth), max(1, len(outcome.smooth) // 20)):
        share = (outcome.smooth[i] - low) / (high - low) if high > low else 0.0
        print(f"        {outcome.rates[i]:.1e}  {outcome.smooth[i]:>14,.4f}  {'#' * round(40 * min(1.0, share))}")
    if outcome.suggestion is None:
        print(f"\nno suggestion: {outcome.reason}")
    else:
        print(f"\nsuggestion: --learning_rate {outcome.suggestion:g} ({outcome.reason})")
    print(f"The run file has learning_rate {given:g}. Nothing was saved.")
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


def diverged_at(losses: list[float]) -> int | None:
    """Return the index of the first loss that is not finite, or ends three that are far above the lowest of the test."""
    first = median(losses[:2]) if losses else 0.0
    lowest = first
    for i, loss in enumerate(losses):
        recent = median(losses[max(0, i - 2) : i + 1])
        if not math.isfinite(loss) or recent > lowest + DIVERGED * max(abs(lowest), first - lowest):
            return i
        lowest = min(lowest, recent)
    return None


def result(test: RangeTest, rates: list[float], losses: list[float]) -> Result:
    """Return what these losses suggest: a tenth of the rate with the lowest smoothed loss, if the loss has fallen.

    Losses after a divergence do not count."""
    if not losses:
        raise UsageError(f"no target in the first {test.updates} global batches of the training data")
    stop = diverged_at(losses)
    if stop is not None:
        rates, losses = rates[: stop + 1], losses[: stop + 1]
    finite = [loss for loss in losses if math.isfinite(loss)]
    width = max(1, test.updates // 30)
    smooth = smoothed(finite, width) or [math.nan]
    low = smooth.index(min(smooth))
    # Of single batches, as the median difference between two in a row. The range of a smoothed noise without any fall
    # exceeds 7 times that of its median in 1 to 2 % of tests.
    noise = median([abs(b - a) for a, b in pairwise(finite)] or [0.0])
    fall = smooth[0] - smooth[low]
    stopped = stop is not None
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
