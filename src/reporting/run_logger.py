"""RunLogger: writes metrics to metrics.jsonl, console and trackers; also ledger.jsonl, and status.json at the end.

Add values to the train lines and eval lines here. Tests: tests/reporting/test_run_logger.py.
"""

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from src.checkpointing.resume import Start
from src.config.errors import UsageError
from src.config.parsing import to_yaml
from src.models.compile_and_recompute import compiled_graphs
from src.reporting.environment import topology, write_environment
from src.reporting.ledger import Ledger
from src.reporting.run_plan import plan_table, run_notes
from src.reporting.trackers import Trackers
from src.reporting.utilization import GpuUse
from src.runtime import console, run_status
from src.runtime.console import Console, exact, in_unit, table
from src.runtime.exit_codes import record_exit_in
from src.storage import atomic_folder, jsonl
from src.storage.jsonl import strict_json
from src.training.step import StepLosses, StepTotals
from src.training.techniques import Techniques
from src.training.train_state import Intervals, Run, TrainState

log = logging.getLogger("run")


class RunLogger:
    """Counts steps on all ranks; writes files and prints on the main process only."""

    def __init__(self, run: Run, start: Start, due: Intervals, techniques: Techniques, lr_at: Callable[[int], float]):
        """Print the plan. If steps are left, truncate the files to the state of `run` and start trackers (a collective)."""
        self.cfg, self.strategy, self.hosts, self.task = run.cfg, run.strategy, run.hosts, run.task
        self.train_set, self.meter = run.datasets["train"], run.meter
        self.is_main, self.folder = self.strategy.accelerator.is_main_process, Path(run.cfg.output_dir)
        self.metrics = jsonl.JsonlWriter(self.folder / "metrics.jsonl")
        self.gpu_use = GpuUse(run)
        self.ledger: Ledger | None = None
        self.trackers: Trackers | None = None
        is_training = not due.complete()
        try:
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
            console.log_to(self.folder / "logs" / f"rank_{self.strategy.accelerator.process_index}.log")
            plan = plan_table(run.cfg, run.datasets, run.model, techniques, lr_at, due.num_steps)
            self.say(table(plan | topology(self.strategy, run.cfg)))
            notes = start.notes + run_notes(run.cfg, run.datasets, techniques, start.checkpoint, run.state.step)
            for note in notes + self.strategy.buffers.notes():
                self.say(note)
            if is_training:
                record_exit_in(self.folder)
                self._begin_files(run)
        except OSError as error:
            raise UsageError(f"output_dir: {self.folder} cannot be written: {error}") from error
        self.console = Console(self.is_main and is_training, run.num_steps, run.task.unit, run.state.step)
        if is_training:
            # A barrier. After it, a stop signal makes all ranks save before they end; before it, they end without saving.
            self.hosts.sum([0.0])
        else:
            self.say(
                f"nothing is left to train: this run is complete at step {run.state.step:,}; to train another run, give "
                "--output_dir, or --resume never to start over"
            )

    def say(self, text: str) -> None:
        """Print `text` on the main process, above the progress bar."""
        if self.is_main and text:
            console.say(text)

    def _begin_files(self, run: Run) -> None:
        """Write the files of a start, truncate metrics.jsonl and ledger.jsonl to the state of `run`, start the trackers."""
        if not self.is_main:
            return
        state = run.state
        atomic_folder.rewrite(self.folder / "config.yaml", to_yaml(self.cfg, self.task.options))
        write_environment(self.folder, self.strategy, self.cfg, self.task.unit, state.step)
        # Steps after the checkpoint are computed again. So is an evaluation that was unfinished when it was saved.
        jsonl.truncate_after(self.metrics.path, lambda line: _is_before(line, state))
        self.ledger = Ledger(self.cfg, self.train_set, state.step)
        run.files += [self.metrics, self.ledger]
        run_status.write_status(self.folder, "running", state.step)
        if self.strategy.accelerator.log_with:
            self.trackers = Trackers(self.strategy.accelerator, self.cfg, state.step)

    # ---- in the loop -------------------------------------------------------------------------------------------------

    def add_step(self, state: TrainState, losses: StepLosses | None, totals: StepTotals, data_seconds: float) -> None:
        """Count one step without waiting for the device."""
        self.meter.add(losses, totals, data_seconds)
        if self.ledger:
            self.ledger.add_step(state.step, totals.examples, totals.hash_low, totals.hash_high)
        self.console.step()

    def train_line(self, state: TrainState) -> None:
        """Write a train line over the steps since the last train line (a collective)."""
        state.finish_update(self.cfg.max_skipped_steps)
        state.logged = state.step
        epoch = self.train_set.epoch_at(state.step, self.cfg)
        values = {"epoch": epoch} | self.meter.line(self.hosts)
        values |= {
            "learning_rate": state.learning_rate,
            "grad_norm": state.grad_norm,
            "skipped": state.step - state.updates,
        }
        values |= self.gpu_use.line(values["tokens_per_second"])
        values |= state.line_values | compiled_graphs(self.cfg)
        state.line_values = {}
        self._line("train", state.step, values)

    def eval_line(self, state: TrainState, metrics: dict) -> None:
        """Write an eval line."""
        self._line("eval", state.step, metrics)

    def _line(self, kind: str, step: int, values: dict) -> None:
        """Append one line to metrics.jsonl, print it, and send it to the trackers."""
        if not self.is_main:
            return
        numbers = {name: float(value) if torch.is_tensor(value) else value for name, value in values.items()}
        line = strict_json({"kind": kind, "step": step} | numbers)
        self.metrics.add(line)
        self.metrics.try_flush()
        if self.trackers:
            self.trackers.add(line)
        log.info("%s", json.dumps(line))
        self.console.line(line)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def finish(self, summary: str, sample: str | None, outcome: dict) -> None:
        """Print the summary, the last metrics and the task's sample; write status.json."""
        self.say(summary)
        self.console.end()
        if not self.is_main:
            return
        if sample:
            self.say(f"\nA sample of the trained model:\n{'─' * 60}\n{sample}\n{'─' * 60}")
        self.metrics.try_flush()
        last = {line["kind"]: line for line in jsonl.read_lines(self.metrics.path)}
        for kind, names in (("train", ("step", "loss", "tokens_per_second")), ("eval", None)):
            if kind in last:
                chosen = {k: exact(v) for k, v in last[kind].items() if k != "kind" and (names is None or k in names)}
                self.say(f"\n{kind}\n{table(in_unit(chosen, self.task.unit))}")
        step = max((line["step"] for line in last.values()), default=0)
        with suppress(OSError):
            run_status.write_status(self.folder, "complete", step, 0, **outcome)
        self.say(f"\nrun    {self.folder.resolve()}\nmodel  {(self.folder / 'final').resolve()}")


def _is_before(line: dict, state: TrainState) -> bool:
    """Return True if a line of metrics.jsonl describes work that `state` already includes."""
    done = {"train": state.logged, "eval": state.evaluated}.get(line["kind"], state.step)
    return line["step"] < state.step or (line["step"] == state.step == done)
