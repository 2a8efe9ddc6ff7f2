"""RunRecord: the files that say what a run did (metrics.jsonl, ledger.jsonl, status.json, …), its console and trackers.

Tests: tests/src/training/test_run_logger.py, tests/engine/checkpointing/test_run_folder.py.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from engine import startup
from engine.config.addresses import address_of
from engine.config.errors import writes_to
from engine.config.parsing import to_yaml
from engine.config.paths import REPOSITORY
from engine.config.redact import redact_all
from engine.process import console, run_status
from engine.process.exit_codes import record_exit_in
from engine.rows.prompts import prompt_in_words
from engine.run.ledger import Ledger
from engine.run.meter import StepTotals
from engine.run.profiler import step_profiler
from engine.run.trackers import Trackers
from engine.run.train_state import Intervals, Run, TrainState, plain_number
from engine.storage import atomic_folder, hub, jsonl


class RunRecord:
    """The record of a run in its folder, on the console and in trackers; written on the main process only."""

    def __init__(self, run: Run, due: Intervals):
        self.run = run
        self.state = run.state
        self.due = due
        self.is_main = run.backend.accelerator.is_main_process
        self.folder = Path(run.cfg.output_dir)
        self.metrics = jsonl.JsonlWriter(self.folder / "metrics.jsonl")
        self.ledger: Ledger | None = None
        self.trackers: Trackers | None = None
        self.profiler: torch.profiler.profile | None = None
        self.last: dict[str, dict] = {}  # the last train line and eval line
        self.is_first_step = True  # of this process
        self.console = console.Console(due.num_steps, run.task.unit, self.state.step)

    def begin(
        self, plan: dict[str, Any], environment: dict[str, Any], notes: list[str], checkpoint: Path | None
    ) -> None:
        """Print the plan and the notes. If steps are left, truncate the files to the state, and start trackers.

        `environment` is for environment.json; `checkpoint` is the one that the run resumes from."""
        rank = self.run.backend.accelerator.process_index
        with writes_to(self.folder, "output_dir"):
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
            console.log_to(self.folder / "logs" / f"rank_{rank}.log")
        self.say(console.table(plan))
        if checkpoint:
            last = jsonl.last_step(self.metrics.path)
            lost = f"; steps up to {last:,} were not saved and are trained again" if last > self.state.step else ""
            self.say(f"Resuming from step {self.state.step:,} ({checkpoint}){lost}")
        for note in notes:
            self.say(note)
        if not self.due.complete():
            record_exit_in(self.folder)
            with writes_to(self.folder, "output_dir"):
                self._begin_files(environment)
        else:
            self.say(
                f"nothing is left to train: this run is complete at step {self.state.step:,}; to train another run, give "
                "--output_dir, or --resume never to start over"
            )

    def say(self, text: str) -> None:
        """Print `text` on the main process."""
        if self.is_main and text:
            console.say(text)

    def _begin_files(self, environment: dict[str, Any]) -> None:
        """Write the files of a start, truncate metrics.jsonl and ledger.jsonl to the state, start the trackers."""
        if not self.is_main:
            return
        run = self.run
        step = self.state.step
        atomic_folder.rewrite(self.folder / "config.yaml", to_yaml(run.cfg, run.task.options))
        self._write_environment(environment)
        # Steps after the checkpoint are computed again. So is an evaluation that was unfinished when it was saved.
        jsonl.truncate_after(self.metrics.path, lambda line: _is_before(line, self.state))
        self.ledger = Ledger(run.cfg, run.datasets["train"], step)
        run.files += [self.metrics, self.ledger]
        self.profiler = step_profiler(run.cfg, step)
        run_status.write_status(self.folder, "running", step)
        if run.backend.accelerator.log_with:
            self.trackers = Trackers(run.backend.accelerator, run.cfg, step, self.due.num_steps)
            self.trackers.start()

    def _write_environment(self, values: dict[str, Any]) -> None:
        """Write environment.json: these values, the commit and the command of this start, and all starts of the run."""
        file = self.folder / "environment.json"
        step = self.state.step
        starts = jsonl.read_json(file).get("starts", []) if step else []
        # git tracks train.py, or it has found another repository in a parent folder.
        commit = _git("rev-parse", "HEAD").strip() if _git("ls-files", "train.py") else ""
        start = {"step": step, "world_size": self.run.backend.accelerator.num_processes, "time": time.time()}
        values = values | {
            "git_commit": commit or None,
            "git_dirty": bool(_git("status", "--porcelain")) if commit else None,
            "command": redact_all(sys.argv),
            "fetched": redact_all(hub.records),
            "starts": [*starts, start],
        }
        atomic_folder.rewrite(file, json.dumps(values, indent=1))

    def add_step(self, totals: StepTotals) -> None:
        """Count one step without waiting for the device."""
        if self.is_main and self.is_first_step:  # the host compiles while it queues the step
            seconds = time.monotonic() - startup.STARTED
            console.stamped(f"first step after {seconds:.1f} s, start and compilation included")
        self.is_first_step = False
        if self.ledger:
            self.ledger.add_step(self.state.step, totals.examples, totals.hash_low, totals.hash_high)
        if self.profiler:
            self.profiler.step()

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl, `kind` train or eval; print it, and send it to the trackers."""
        if not self.is_main:
            return
        fields = {name: plain_number(value) for name, value in values.items()}
        line = jsonl.strict_json({"kind": kind, "step": self.state.step} | fields)
        self.last[kind] = line
        self.metrics.add(line)
        self.metrics.try_flush()
        if self.trackers:
            self.trackers.add(line)
        self.console.line(line)

    def write_samples(self, samples: list[dict]) -> None:
        """Append a line of `kind` sample to metrics.jsonl for each {"prompt", "answer"}; print them, and send them to the
        trackers that take texts."""
        if not self.is_main or not samples:
            return
        for sample in samples:
            self.metrics.add({"kind": "sample", "step": self.state.step} | sample)
        self.metrics.try_flush()
        in_words = [(prompt_in_words(sample["prompt"]), sample["answer"]) for sample in samples]
        if self.trackers:
            self.trackers.add_samples(in_words, self.state.step)
        self.console.samples(self.state.step, in_words)

    def finish(self, summary: str, sample: str | None, outcome: dict) -> None:
        """Print the summary, the task's sample and the last eval line; write status.json."""
        self.say(summary)
        if not self.is_main:
            return
        if self.profiler:
            self.profiler.stop()
        if sample:
            rule = "─" * 60
            self.say(f"\nA sample of the trained model:\n{rule}\n{sample}\n{rule}")
        for kind, line in self.last.items():
            names = ["step", "loss"] if kind == "train" else [name for name in line if name != "kind"]
            rows = {name: console.exact(line[name]) for name in names}
            self.say(f"\n{kind}\n{console.table(rows)}")
        self.metrics.try_flush()
        with suppress(OSError):
            run_status.write_status(self.folder, "complete", self.state.step, 0, **outcome)
        folder = address_of.get(str(self.folder), self.folder.resolve())
        self.say(f"\nrun    {folder}\nmodel  {folder}/final")


def _is_before(line: dict, state: TrainState) -> bool:
    """Return True if a line of metrics.jsonl describes work that `state` already includes."""
    done = {"train": state.logged, "eval": state.evaluated, "sample": state.evaluated}.get(
        str(line.get("kind")), state.step
    )
    return line["step"] < state.step or (line["step"] == state.step == done)


def _git(*words: str) -> str:
    """Return the output of a git command in this repository, or an empty text if it fails."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *words]  # fsmonitor would run a program
    try:
        done = subprocess.run(command, capture_output=True, cwd=REPOSITORY, check=True, timeout=60, text=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def write_evaluation(folder: Path, step: int | None, metrics: dict[str, Any], samples: Sequence[dict] = ()) -> None:
    """Print the metrics of an evaluation, and write them to eval.json in `folder`; print the answers to sample prompts."""
    line = jsonl.strict_json({"kind": "eval", "step": step} | metrics)
    rows = {name: console.exact(value) for name, value in line.items() if name != "kind"}
    print(console.table(rows))
    for sample in samples:
        print(f"\n{console.sample(prompt_in_words(sample['prompt']), sample['answer'])}")
    with writes_to(folder, "output_dir"):
        folder.mkdir(parents=True, exist_ok=True)
        atomic_folder.rewrite(folder / "eval.json", json.dumps(line, allow_nan=False) + "\n")
    print(f"\nwritten to {(folder / 'eval.json').resolve()}")
