"""Training state: step, skipped updates, best evaluation, and what is due at a step.

Tests: tests/training/test_state.py, tests/training/test_step.py.
"""

import logging
import math
import os
import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch

from src.config.best_metric import best_by
from src.config.errors import Failure, UsageError, did_you_mean
from src.config.schema import RunConfig
from src.data.batch_plan import MicroBatch
from src.tasks import Batch

Window = list[tuple[MicroBatch, Batch]]


class DeviceFlag:
    """A truth that the device is still to find out; read later without waiting for the work that was queued since."""

    def __init__(self, value: torch.Tensor):
        self.event = None
        if value.is_cuda:
            value = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(value, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        self.value = value

    def __bool__(self) -> bool:
        if self.event is not None:
            self.event.synchronize()
        return bool(self.value)


class UpdateResult(NamedTuple):
    """What one update came to, and what it was made of, in case it came to nothing."""

    skipped: DeviceFlag  # the loss or the gradient of some rank was not finite
    step: int
    window: Window  # this rank's
    losses: torch.Tensor  # of its micro-batches


@dataclass
class TrainState:
    """Where a run is: all of its state besides weights, optimizer and the sums of the next train line."""

    step: int = 0  # global batches of the plan that are done
    updates: int = 0  # those that changed the weights; the schedule goes by them
    skipped: int = 0  # updates in a row, up to now, that did not, because something was not finite
    evaluated: int = 0  # step of the last evaluation that was finished
    best: float | None = None  # best value so far of the metric that early stopping and the best model go by
    best_step: int = 0  # step of that evaluation; 0: none, or not known
    best_metric: str | None = None  # name of that metric
    best_greater: bool = False  # whether a greater value of it is better
    evals_without_improvement: int = 0  # evaluations since that did not improve on it
    stream: dict | None = None  # where the lanes of a stream are

    def __post_init__(self):
        self.pending: UpdateResult | None = None  # of the last update, not yet counted; no field, and never saved
        self.alone = False  # whether this rank updates by its own gradient for now (local SGD)

    def finish_update(self, most: int) -> None:
        """Count the outcome of the last update; Failure on all ranks after `most` in a row that came to nothing.

        A rank that updates alone counts what it left out itself; the schedule, which is that of all ranks, goes on.
        Waits for the device where its answer is still under way: call it when the next gradient is queued behind."""
        outcome, self.pending = self.pending, None
        if outcome is None:
            return
        skipped = bool(outcome.skipped)
        self.updates += self.alone or not skipped
        self.skipped = self.skipped + 1 if skipped else 0
        if skipped:
            report_skipped(outcome, self.alone)
        if not self.alone:
            self.give_up(most, outcome.step)

    def give_up(self, most: int, step: int) -> None:
        """Raise Failure if `most` updates in a row, up to that of `step`, came to nothing."""
        if self.skipped >= most:
            where = " on some rank" if self.alone else ""
            weights = "" if self.alone else "The weights are those before them. "
            raise Failure(
                f"{self.skipped} updates in a row were left out{where} because the loss or the gradient was not finite, the "
                f"last at step {step} (max_skipped_steps). {weights}Lower learning_rate, or look at the examples named above "
                "and in logs/; the same command goes on from the last checkpoint"
            )

    def follow(self, cfg: RunConfig) -> None:
        """Start the comparison of evaluations anew if another metric, or direction, decides from now on."""
        name, greater = best_by(cfg)
        if self.best_metric is not None and (self.best_metric, self.best_greater) != (name, greater):
            self.best, self.best_step, self.evals_without_improvement = None, 0, 0
        self.best_metric, self.best_greater = name, greater

    def update_best(self, line: dict, cfg: RunConfig) -> None:
        """Note that this step is evaluated, and whether that improved on the best evaluation so far."""
        self.follow(cfg)
        name = self.best_metric
        if name not in line:
            raise UsageError(
                f"metric_for_best_model: an evaluation has no {name!r}{did_you_mean(name, line)}; it has {', '.join(line)}"
            )
        self.evaluated = self.step
        value = line[name]
        sign = -1 if self.best_greater else 1
        if value is not None and math.isfinite(value) and (self.best is None or sign * value < sign * self.best):
            self.best, self.best_step, self.evals_without_improvement = value, self.step, 0
        else:
            self.evals_without_improvement += 1


class Intervals:
    """What is due at the step that `progress` has reached: the same on every rank."""

    def __init__(self, cfg: RunConfig, progress: TrainState, total: int, evaluates: bool):
        self.cfg, self.progress, self.total, self.evaluates = cfg, progress, total, evaluates
        progress.follow(cfg)

    def finished(self) -> bool:
        """Return whether the last step is done: of the run's length, or by early stopping."""
        patience = self.cfg.early_stopping_patience
        return self.progress.step >= self.total or bool(
            patience and self.progress.evals_without_improvement >= patience
        )

    def due(self, every: int | None) -> bool:
        """Return whether this is a step for something done every so many steps, and always at the end."""
        return self.finished() or bool(every and self.progress.step % every == 0)

    def evaluation_due(self) -> bool:
        """Return whether this step is still to be evaluated."""
        progress = self.progress
        return self.evaluates and progress.evaluated < progress.step and self.due(self.cfg.eval_steps)

    def best(self) -> bool:
        """Return whether this step is the best evaluated one so far, by a metric that is named."""
        return bool(self.cfg.metric_for_best_model) and 0 < self.progress.best_step == self.progress.step

    def saved(self) -> bool:
        """Return whether this step is to be saved: by the interval, at the end, and where it is a new best."""
        return self.due(self.cfg.save_steps) or self.best()

    def complete(self) -> bool:
        """Return whether nothing is left to do but to write the final model."""
        return self.finished() and not self.evaluation_due()

    def outcome(self) -> dict:
        """Return for status.json whether the run ended early, and which evaluation was the best by the metric that is named."""
        progress, named = self.progress, self.cfg.metric_for_best_model and self.progress.best_step
        best = (progress.best_step, progress.best_metric, progress.best) if named else (None, None, None)
        early = self.finished() and progress.step < self.total
        return {"stopped_early": early} | dict(zip(("best_step", "best_metric", "best_value"), best, strict=True))

    def early(self) -> str:
        """Return why the run ended before its last step, or nothing."""
        if not self.outcome()["stopped_early"]:
            return ""
        return (
            f"stopped early at step {self.progress.step:,} of {self.total:,}: {self.progress.best_metric} has not improved for "
            f"{self.progress.evals_without_improvement} evaluation{'s' * (self.progress.evals_without_improvement > 1)} (early_stopping_patience)"
        )


def report_skipped(outcome: UpdateResult, alone: bool = False) -> None:
    """Say on the rank that computed them which examples had a loss that is not finite, and keep it in its log."""
    rank = os.environ.get("RANK", "0")
    pairs = zip(outcome.window, outcome.losses.tolist(), strict=True)
    window = [(micro.ids.tolist(), loss) for (micro, _), loss in pairs if not micro.dummy]
    wrong = [i for ids, loss in window if not math.isfinite(loss) for i in ids]
    every = [i for ids, _ in window for i in ids]
    what = f"the loss of examples {wrong}" if wrong else f"the gradient (here, of examples {every})"
    where = "on this rank" if alone else "on all ranks"
    text = f"step {outcome.step}: {what} is not finite; the update is left out {where}, no weight or moment has changed"
    logging.getLogger("run").warning("%s", text)
    if wrong or alone or rank == "0":
        print(f"warning: rank {rank}, {text}", file=sys.stderr, flush=True)
