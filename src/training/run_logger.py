"""RunLogger: writes metrics to metrics.jsonl, console and trackers; also ledger.jsonl, and status.json at the end.

Add values to the train lines and eval lines here. Tests: tests/src/training/test_run_logger.py.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from engine import startup
from engine.checkpointing.resume import Start
from engine.config.add_on import AddOn
from engine.config.addons import fields_of_addons_with
from engine.config.errors import writes_to
from engine.config.parsing import to_yaml
from engine.config.schema import RunConfig
from engine.data.batch_plan import LOW
from engine.loop.step_totals import StepLosses, StepTotals
from engine.loop.techniques import Techniques
from engine.loop.trackers import Trackers
from engine.loop.train_state import Intervals, Run, TrainState, plain_number
from engine.models.compile_and_recompute import compiled_graphs
from engine.process import console, run_status
from engine.process.exit_codes import record_exit_in
from engine.storage import atomic_folder, jsonl
from src.training.environment import topology, write_environment
from src.training.run_plan import plan_table, run_notes
from src.training.utilization import GpuUse, step_profiler


class RunLogger:
    """Counts steps on all ranks; writes files and prints on the main process only."""

    def __init__(self, run: Run, due: Intervals):
        self.run = run
        self.cfg = run.cfg
        self.state = run.state
        self.due = due
        self.is_main = run.backend.accelerator.is_main_process
        self.folder = Path(run.cfg.output_dir)
        self.metrics = jsonl.JsonlWriter(self.folder / "metrics.jsonl")
        self.gpu_use = GpuUse(run)
        self.ledger: Ledger | None = None
        self.trackers: Trackers | None = None
        self.profiler: torch.profiler.profile | None = None
        self.last: dict[str, dict] = {}  # the last train line and eval line
        self.is_first_step = True  # of this process
        self.console = console.Console(due.num_steps, run.task.unit, self.state.step)

    def begin(self, start: Start, techniques: Techniques, lr_at: Callable[[int], float]) -> None:
        """Print the plan. If steps are left, truncate the files to the state of the run and start trackers."""
        run, due = self.run, self.due
        is_training = not due.complete()
        with writes_to(self.folder, "output_dir"):
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
            console.log_to(self.folder / "logs" / f"rank_{run.backend.accelerator.process_index}.log")
        plan = plan_table(run.cfg, run.datasets, run.model, techniques, lr_at, due.num_steps)
        self.say(console.table(plan | topology(run.backend, run.cfg)))
        self.say(f"Resuming from step {self.state.step:,} ({start.checkpoint})" if start.checkpoint else "")
        for note in start.notes + run_notes(run.cfg, run.datasets):
            self.say(note)
        if is_training:
            record_exit_in(self.folder)
            with writes_to(self.folder, "output_dir"):
                self._begin_files()
        else:
            self.say(
                f"nothing is left to train: this run is complete at step {self.state.step:,}; to train another run, give "
                "--output_dir, or --resume never to start over"
            )

    def say(self, text: str) -> None:
        """Print `text` on the main process."""
        if self.is_main and text:
            console.say(text)

    def _begin_files(self) -> None:
        """Write the files of a start, truncate metrics.jsonl and ledger.jsonl to the state, start the trackers."""
        if not self.is_main:
            return
        run, step = self.run, self.state.step
        atomic_folder.rewrite(self.folder / "config.yaml", to_yaml(run.cfg, run.task.options))
        write_environment(self.folder, run.backend, run.cfg, run.task.unit, step)
        # Steps after the checkpoint are computed again. So is an evaluation that was unfinished when it was saved.
        jsonl.truncate_after(self.metrics.path, lambda line: _is_before(line, self.state))
        self.ledger = Ledger(run.cfg, run.datasets["train"], step)
        run.files += [self.metrics, self.ledger]
        self.profiler = step_profiler(run.cfg, step)
        run_status.write_status(self.folder, "running", step)
        if run.backend.accelerator.log_with:
            self.trackers = Trackers(run.backend.accelerator, run.cfg, step)

    def add_step(self, losses: StepLosses | None, totals: StepTotals, data_seconds: float) -> None:
        """Count one step without waiting for the device."""
        if self.is_main and self.is_first_step:  # the host compiles while it queues the step
            console.stamped(
                f"first step after {time.monotonic() - startup.STARTED:.1f} s, start and compilation included"
            )
        self.is_first_step = False
        self.run.meter.add(losses, totals, data_seconds)
        if self.ledger:
            self.ledger.add_step(self.state.step, totals.examples, totals.hash_low, totals.hash_high)
        if self.profiler:
            self.profiler.step()

    def train_line(self) -> None:
        """Write a train line over the steps since the last train line (a collective)."""
        state, run = self.state, self.run
        state.finish_update(self.cfg.max_skipped_steps)
        state.logged = state.step
        values = {"epoch": run.datasets["train"].epoch_at(state.step, self.cfg)} | run.meter.line(run.hosts)
        values |= {"learning_rate": state.learning_rate, "grad_norm": state.grad_norm}
        values |= {"skipped": state.step - state.updates} | self.gpu_use.line(values["tokens_per_second"])
        self._line("train", values | state.line_values | compiled_graphs(self.cfg))
        state.line_values = {}

    def eval_line(self, metrics: dict) -> None:
        """Write an eval line."""
        self._line("eval", metrics)

    def _line(self, kind: str, values: dict) -> None:
        """Append one line to metrics.jsonl, print it, and send it to the trackers."""
        if not self.is_main:
            return
        numbers = {name: plain_number(value) for name, value in values.items()}
        line = self.last[kind] = jsonl.strict_json({"kind": kind, "step": self.state.step} | numbers)
        self.metrics.add(line)
        self.metrics.try_flush()
        if self.trackers:
            self.trackers.add(line)
        self.console.line(line)

    def finish(self, summary: str, sample: str | None, outcome: dict) -> None:
        """Print the summary, the task's sample and the last eval line; write status.json."""
        self.say(summary)
        if not self.is_main:
            return
        if self.profiler:
            self.profiler.stop()
        self.say(f"\nA sample of the trained model:\n{'─' * 60}\n{sample}\n{'─' * 60}" if sample else "")
        for kind, line in self.last.items():
            names = ["step", "loss"] if kind == "train" else [name for name in line if name != "kind"]
            self.say(f"\n{kind}\n{console.table({name: console.exact(line[name]) for name in names})}")
        self.metrics.try_flush()
        with suppress(OSError):
            run_status.write_status(self.folder, "complete", self.state.step, 0, **outcome)
        self.say(f"\nrun    {self.folder.resolve()}\nmodel  {(self.folder / 'final').resolve()}")


def _is_before(line: dict, state: TrainState) -> bool:
    """Return True if a line of metrics.jsonl describes work that `state` already includes."""
    done = {"train": state.logged, "eval": state.evaluated}.get(str(line.get("kind")), state.step)
    return line["step"] < state.step or (line["step"] == state.step == done)


# ---- ledger.jsonl: a hash of each step's example ids; addons/tools/ledger.py compares them ---------------------------

LEDGER = "ledger.jsonl"
OF_CORE = {"examples", "global_batch_size", "seed", "quotas"}  # the core's inputs of the plan
FLUSH_EVERY = 64  # lines; a write after every step would cost a few percent of a 10 ms step


def hash_text(low: float, high: float) -> str:
    """Format the two sums of `hash_ids` over a global batch as 16 hexadecimal digits."""
    return f"{int(high) & int(LOW):08x}{int(low) & int(LOW):08x}"


class Ledger(jsonl.JsonlWriter):
    """Appends a line per step to ledger.jsonl. The first line holds the batch plan's inputs."""

    def __init__(self, cfg: RunConfig, train_set, step: int):
        """Delete the lines after `step`; write the first line if the file is missing or empty."""
        super().__init__(Path(cfg.output_dir, LEDGER))
        jsonl.truncate_after(self.path, lambda line: line["step"] <= step)
        if not self.path.exists() or not self.path.stat().st_size:
            plan = {"examples": train_set.stats["examples"], "global_batch_size": cfg.global_batch_size}
            plan |= {"seed": cfg.seed} | fields_of_addons_with(cfg, AddOn.change_plan)
            plan |= {"quotas": q} if (q := train_set.quotas) else {}
            self.add({"step": 0, "after": step, "data": train_set.stats.get("rows"), "plan": plan})

    def add_step(self, step: int, examples: float, low: float, high: float) -> None:
        """Queue the line of one step. Lines are written every FLUSH_EVERY steps and before each checkpoint."""
        self.waiting.append(f'{{"step": {step}, "examples": {int(examples)}, "ids": "{hash_text(low, high)}"}}\n')
        if len(self.waiting) >= FLUSH_EVERY:
            self.try_flush()
