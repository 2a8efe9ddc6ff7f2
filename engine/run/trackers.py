"""Trackers (wandb, tensorboard, …) behind one queue and one thread, so that none can delay or end a run.

The trackers are Accelerate's; docs/tracking.md says which project, run name and id they get.
Tests: tests/engine/run/test_trackers.py.
"""

import json
import math
import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from engine.config.errors import one_line, warn
from engine.config.paths import REPOSITORY
from engine.config.redact import redact_all
from engine.config.run_config import RunConfig, field_values
from engine.process.exit_codes import on_exit
from engine.storage import atomic_folder, jsonl

TIMEOUT = 10.0  # seconds that the first step waits for trackers to start, and the end of a process for them to close
FILE = "trackers.json"  # in the run folder: the run id for wandb


class Trackers:
    """The trackers of `report_to`; main process only. One thread makes every call to them, in order."""

    def __init__(self, accelerator: Any, cfg: RunConfig, step: int, total: int):
        """`step`: at which a run of `total` steps begins or resumes. `start` starts them."""
        self.accelerator = accelerator
        self.cfg = cfg
        self.step = step
        self.total = total
        self.queue: queue.SimpleQueue = queue.SimpleQueue()  # (what, values, step); None ends the thread
        self.started = threading.Event()
        self.deadline = math.inf  # a second close() cannot extend the first one's wait
        self.busy = ""  # the tracker that was called last
        self.failed: set[str] = set()  # those that raised an error
        self.thread = threading.Thread(target=self._run, name="trackers", daemon=True)

    def start(self) -> None:
        """Start the trackers; wait up to TIMEOUT for them.

        Their packages must be imported before dataloader workers are forked."""
        sys.argv[1:] = []  # wandb uploads the command line, and a URL in it may carry a signature
        terminal = sys.stdin
        with open(os.devnull) as sys.stdin:  # a tracker that asks for a password would wait forever
            self.thread.start()
            on_exit(self.close)
            if not self.started.wait(TIMEOUT):
                warn(f"report_to: {self.busy} has not started in {TIMEOUT:g} s; training does not wait for it")
        sys.stdin = terminal

    def add(self, line: dict) -> None:
        """Queue the numbers of a line of metrics.jsonl, under names such as `train/loss`; return at once."""
        values = {}
        for name, value in line.items():
            if isinstance(value, int | float) and name != "step":
                values[f"{line['kind']}/{name}"] = value
        self.queue.put(("log", values, line["step"]))

    def add_samples(self, samples: list[tuple[str, str]], step: int) -> None:
        """Queue prompts with their answers: a table for a tracker that has tables, texts for TensorBoard; return at once."""
        self.queue.put(("samples", samples, step))

    def close(self, seconds: float | None = None) -> bool:
        """Close all trackers; return True if they closed within `seconds` (default TIMEOUT) of the first call."""
        timeout = TIMEOUT if seconds is None else seconds
        self.deadline = min(self.deadline, time.monotonic() + timeout)
        self.queue.put(None)
        self.thread.join(max(0.0, self.deadline - time.monotonic()))
        if self.thread.is_alive():
            warn(f"report_to: {self.busy} has not closed in time, and may lack lines; metrics.jsonl has all")
        return not self.thread.is_alive()

    def _run(self) -> None:
        cfg = self.cfg
        accelerator = self.accelerator
        options = tracker_options(cfg, self.step)
        project = cfg.project or os.environ.get("WANDB_PROJECT") or REPOSITORY.name
        fields: dict[str, int | float | str] = {"total_steps": self.total}
        for name, value in redact_all(field_values(cfg)).items():
            fields[name] = value if isinstance(value, int | float | str) else str(value)
        accelerator.project_configuration.logging_dir = str(Path(cfg.output_dir).resolve() / "trackers")
        trackers = []
        for name in map(str, accelerator.log_with):  # one at a time, so that an error of one does not stop the others
            accelerator.log_with = [name]
            accelerator.trackers = []
            self._try(name, accelerator.init_trackers, project, fields, options)
            trackers += accelerator.trackers
        accelerator.trackers = trackers  # for accelerator.get_tracker
        self.started.set()
        for what, values, step in iter(self.queue.get, None):
            for tracker in trackers:  # as in accelerator.log
                log = tracker.log if what == "log" else partial(log_samples, tracker)
                self._try(tracker.name, log, values, step=step)
        for tracker in trackers:
            self._try(tracker.name, tracker.finish)

    def _try(self, name: str, call: Callable, *args, **kwargs) -> None:
        """Call a tracker; warn of its first error."""
        self.busy = name
        try:
            call(*args, **kwargs)
        except BaseException as error:  # SystemExit too: nothing above would catch it in a thread
            if name not in self.failed:
                self.failed.add(name)
                warn(f"report_to: {name} failed ({type(error).__name__}: {one_line(error)}); training continues")


def log_samples(tracker: Any, samples: list[tuple[str, str]], step: int) -> None:
    """Log prompts with their answers, if the tracker takes texts."""
    if hasattr(tracker, "log_table"):  # wandb, clearml
        tracker.log_table("samples", columns=["prompt", "answer"], data=[[*each] for each in samples], step=step)
    elif tracker.name == "tensorboard":
        for i, (prompt, answer) in enumerate(samples):
            indented = [f"    {line}" for line in (*prompt.splitlines(), "", *answer.splitlines())]  # code, in Markdown
            tracker.log({f"sample/{i}": "\n".join(indented)}, step=step)


def tracker_options(cfg: RunConfig, step: int) -> dict[str, dict]:
    """Return the options of each tracker. A resumed run keeps its run id; wandb's environment variables win."""
    env = os.environ
    folder = Path(cfg.output_dir).resolve()
    previous = jsonl.read_json(folder / FILE).get("run_id") if step else None
    run_id = env.get("WANDB_RUN_ID") or previous or uuid.uuid4().hex
    atomic_folder.rewrite(folder / FILE, json.dumps({"run_id": run_id}))
    env.setdefault("WANDB_SILENT", "true")
    env.setdefault("WANDB_CONSOLE", "off")  # do not upload the console output as well
    name = cfg.run_name or env.get("WANDB_NAME") or folder.name
    return {
        "wandb": {
            "id": run_id,
            "resume": env.get("WANDB_RESUME") or "allow",
            "name": name,
            "dir": env.get("WANDB_DIR") or str(folder),
        },
        "mlflow": {"run_name": cfg.run_name or folder.name},
        "trackio": {"name": cfg.run_name or folder.name, "resume": "allow"},
        "tensorboard": {"purge_step": step + 1},  # steps after the checkpoint are computed again
    }
