"""Training state (step, skipped updates, best evaluation), what is due at a step, and the parts of a run.

Tests: tests/engine/run/test_train_state.py, tests/src/test_step.py.
"""

import logging
import math
import os
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from engine.config.errors import Failure, UsageError, did_you_mean, warn
from engine.config.find_addons import schedule_addon
from engine.config.run_config import RunConfig, best_by
from engine.distributed.backends import Backend
from engine.distributed.host_group import HostGroup
from engine.find_tasks import Task
from engine.run.meter import Meter
from engine.run.model_with_loss import ModelWithLoss
from engine.run.totals_and_votes import StepBatch, StepLosses
from engine.storage.jsonl import JsonlWriter


class Update:
    """The last update, which the device may still be computing, with the data for a report if it is skipped."""

    def __init__(self, skipped: torch.Tensor, step: int, batch: StepBatch, losses: StepLosses):
        self.step = step
        self.batch = batch
        self.losses = losses
        self.event = None
        self.skipped = skipped  # the loss or the gradient of some rank was not finite, or a technique skipped it
        if skipped.is_cuda:  # reading this copy does not wait for later work
            self.skipped = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(skipped, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def was_skipped(self) -> bool:
        """Return whether the update was skipped; this waits until the device has computed it."""
        if self.event is not None:
            self.event.synchronize()
        return bool(self.skipped)

    def report(self, norm: float) -> None:
        """Log this skipped update; print it on rank 0 and on ranks with a non-finite loss.

        A finite update is skipped only by a technique."""
        num_dummies = len(self.losses.losses) - len(self.batch)  # in front, of a sharded model
        losses = self.losses.losses.tolist()[num_dummies:]
        examples = []
        bad_examples = []
        for (micro, _), loss in zip(self.batch, losses, strict=True):
            if not micro.dummy:
                examples += micro.ids.tolist()
                if not math.isfinite(loss):
                    bad_examples += micro.ids.tolist()
        if bad_examples:
            reason = f"the loss of examples {bad_examples} is not finite"
        elif math.isfinite(norm):
            reason = f"the gradient (here, of examples {examples}) is a spike of norm {norm:.4g}"
        else:
            reason = f"the gradient (here, of examples {examples}) is not finite"
        text = f"rank {os.environ.get('RANK', '0')}, step {self.step}: {reason}; the update is skipped on all ranks"
        logging.getLogger("run").warning("%s", text)
        warn(text, any_rank=bool(bad_examples))


def plain_number(value: Any) -> Any:
    """Return a tensor of one number as a float, which waits for the device; any other value unchanged."""
    return float(value) if torch.is_tensor(value) else value


@dataclass
class TrainState:
    """The numbers in a checkpoint, except the sums for the next train line of metrics.jsonl. All fields are saved."""

    step: int = 0  # completed steps, including those with a skipped update
    updates: int = 0  # steps that changed the weights; the learning rate depends on it
    skipped: int = 0  # updates skipped in a row up to now: loss or gradient not finite, or a spike
    logged: int = 0  # step of the last train line
    evaluated: int = 0  # step of the last finished evaluation
    best: float | None = None  # best value so far of the metric that selects the best model
    best_step: int = 0  # step of the best evaluation; 0: none, or unknown
    best_metric: str | None = None  # name of that metric
    best_greater: bool = False  # whether a greater value is better
    evals_without_improvement: int = 0  # evaluations since the best one
    learning_rate: float | None = None  # of the last update
    grad_norm: torch.Tensor | float | None = None  # of the last update, before clipping; a number in a checkpoint
    plateau: dict | None = None  # state of any schedule that follows evaluations, such as reduce_lr_on_plateau
    stream: dict | None = None  # position in training data that is read during training; None: the step tells it
    # Further values of the next train line; numbers in a checkpoint.
    line_values: dict[str, torch.Tensor | float | None] = field(default_factory=dict)

    def __post_init__(self):  # what is never saved
        self.pending: Update | None = None  # not yet counted

    @property
    def lr_factor(self) -> float:
        """Return the factor of the learning rate that evaluations have led to."""
        return self.plateau["factor"] if self.plateau else 1.0

    def add_update(self, grad_norm: torch.Tensor, skipped: torch.Tensor, batch: StepBatch, losses: StepLosses) -> None:
        """Note an update that the device may still be computing; `finish_update` counts it."""
        self.grad_norm = grad_norm
        self.pending = Update(skipped, self.step, batch, losses)

    def saved_fields(self) -> dict:
        """Return the fields of a checkpoint; this waits for the device."""
        values = {name: plain_number(value) for name, value in self.line_values.items()}
        return asdict(replace(self, grad_norm=plain_number(self.grad_norm), line_values=values))

    def finish_update(self, max_skipped: int) -> None:
        """Count the last update as done or skipped; raise Failure on all ranks if `max_skipped` were skipped in a row.

        This may wait for the device, so call it when the next gradient is already queued."""
        update = self.pending
        self.pending = None
        if update is None:
            return
        if not update.was_skipped():
            self.updates += 1
            self.skipped = 0
            return
        self.skipped += 1
        norm = float("nan") if self.grad_norm is None else float(self.grad_norm)
        update.report(norm)
        if self.skipped >= max_skipped:
            reason = "the gradient spiked" if math.isfinite(norm) else "the loss or the gradient was not finite"
            raise Failure(
                f"{self.skipped} updates in a row were skipped because {reason}, the last at step {update.step} "
                f"(max_skipped_steps is {max_skipped}). Skipped updates do not change the weights. Lower learning_rate, or "
                "check the examples named above and in logs/; the same command resumes from the last checkpoint"
            )

    def forget_best(self) -> None:
        """Start the comparison of evaluations over."""
        self.best = None
        self.best_step = 0
        self.evals_without_improvement = 0

    def use_metric(self, cfg: RunConfig) -> None:
        """Set the metric of the best model; forget the best evaluation if the metric or its direction has changed."""
        name, greater = best_by(cfg)
        if self.best_metric is not None and (self.best_metric, self.best_greater) != (name, greater):
            self.forget_best()
        self.best_metric = name
        self.best_greater = greater

    def update_best(self, metrics: dict, cfg: RunConfig) -> None:
        """Mark this step as evaluated and compare it with the best one; raise UsageError if the metric is missing."""
        self.use_metric(cfg)
        name = str(self.best_metric)
        if name not in metrics:
            hint = f"{did_you_mean(name, metrics)}; it has {', '.join(metrics)}"
            raise UsageError(f"metric_for_best_model: an evaluation has no {name!r}{hint}")
        self.evaluated = self.step
        value = metrics[name]
        after_evaluation = getattr(schedule_addon(cfg), "after_evaluation", None)
        if after_evaluation is not None:
            self.plateau = after_evaluation(cfg, self.plateau, value, self.best_greater)
        if self._is_better(value):
            self.best = value
            self.best_step = self.step
            self.evals_without_improvement = 0
        else:
            self.evals_without_improvement += 1

    def _is_better(self, value: float | None) -> bool:
        """Return whether a value of the metric is better than the best one so far; one that is not finite never is."""
        if value is None or not math.isfinite(value):
            return False
        if self.best is None:
            return True
        return value > self.best if self.best_greater else value < self.best


def check_finite(metrics: dict, cfg: RunConfig, step: int) -> None:
    """Warn of metrics that are not finite; with stop_on_nan_metric raise Failure."""
    not_finite = []
    for name, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            not_finite.append(f"{name} is {value}")
    if not not_finite:
        return
    text = f"evaluation at step {step}: {', '.join(not_finite)}"
    if cfg.stop_on_nan_metric:
        raise Failure(f"{text} (stop_on_nan_metric). The state is saved; to resume from an earlier one, give --resume")
    warn(text)


class Intervals:
    """Whether logging, evaluation or a save is due at the current step of `state`; the same on every rank."""

    def __init__(self, cfg: RunConfig, state: TrainState, num_steps: int, has_validation: bool):
        self.cfg = cfg
        self.state = state
        self.num_steps = num_steps
        self.has_validation = has_validation
        self.last_save = (state.step, state.evaluated)  # (step, evaluated) at the last save or at resume

    def finished(self) -> bool:
        """Return whether training is over: all steps are done, or early stopping has ended it."""
        if self.state.step >= self.num_steps:
            return True
        patience = self.cfg.early_stopping_patience
        return bool(patience) and self.state.evals_without_improvement >= patience

    def every(self, steps: int | None) -> bool:
        """Return whether this step ends an interval of `steps` steps, or the run."""
        return self.finished() or bool(steps and self.state.step % steps == 0)

    def log(self) -> bool:
        """Return whether a train line (metrics.jsonl) is due and not yet written."""
        return self.state.logged < self.state.step and self.every(self.cfg.logging_steps)

    def evaluate(self) -> bool:
        """Return whether an evaluation is due and not yet finished."""
        return self.has_validation and self.state.evaluated < self.state.step and self.every(self.cfg.eval_steps)

    def replica_check(self) -> bool:
        """Return whether drift_check_steps asks for a comparison of the model replicas."""
        return bool(self.cfg.drift_check_steps) and self.every(self.cfg.drift_check_steps)

    def best(self) -> bool:
        """Return whether metric_for_best_model is set and this step is the best evaluated one so far."""
        return bool(self.cfg.metric_for_best_model) and 0 < self.state.best_step == self.state.step

    def save(self) -> bool:
        """Return whether a checkpoint is due: by the interval, at the end, or because this step is the best one."""
        is_new = (self.state.step, self.state.evaluated) != self.last_save
        return is_new and (self.every(self.cfg.save_steps) or self.best())

    def complete(self) -> bool:
        """Return whether only the final model is left to write."""
        return self.finished() and not self.evaluate()

    def outcome(self) -> dict:
        """Return fields of status.json: early stopping and, if metric_for_best_model is set, the best evaluation."""
        state = self.state
        best = {"best_step": state.best_step, "best_metric": state.best_metric, "best_value": state.best}
        if not self.cfg.metric_for_best_model or not state.best_step:
            best = dict.fromkeys(best)
        return {"stopped_early": self.stopped_early()} | best

    def stopped_early(self) -> bool:
        """Return whether early stopping has ended the run."""
        return self.finished() and self.state.step < self.num_steps

    def early_stop_message(self) -> str:
        """Return the message about early stopping, or an empty string if the run did not stop early."""
        if not self.stopped_early():
            return ""
        state = self.state
        reached = f"step {state.step:,} of {self.num_steps:,}"
        reason = f"evaluations in a row without a better {state.best_metric}: {state.evals_without_improvement}"
        final = "" if self.cfg.metric_for_best_model else "; without metric_for_best_model, final/ is this last step"
        return f"stopped early at {reached} ({reason}; early_stopping_patience){final}"


@dataclass(eq=False)
class Run:
    """What a run consists of. Every rank has one."""

    cfg: Any  # RunConfig of src/fields.py
    backend: Backend
    task: Task
    datasets: dict[str, Any]
    model: ModelWithLoss  # its parameters are trained; sharded under FSDP2
    module: torch.nn.Module  # the wrapped model, to call
    optimizer: torch.optim.Optimizer
    num_steps: int
    state: TrainState = field(default_factory=TrainState)  # in a step, state.step already counts this step
    meter: Meter = field(default_factory=Meter)  # sums for the next train line of metrics.jsonl
    files: list[JsonlWriter] = field(default_factory=list)  # of lines about steps: flushed before each checkpoint

    @property
    def hosts(self) -> HostGroup:
        """The group in which all ranks sum small vectors on the host."""
        return self.backend.hosts

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the trainable parameters by name; sharded ones are DTensors."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}
