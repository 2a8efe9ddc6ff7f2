"""metrics.jsonl: sums between two log lines, and the lines of a run.

A fork adds numbers to the lines here. Tests: tests/reporting/test_metrics.py.
"""

import json
import logging
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.distributed.strategies import Strategy
from src.reporting import trackers
from src.reporting.environment import environment, save_diff
from src.runtime import console, run_status
from src.runtime.console import Console, exact, table
from src.runtime.exit_codes import record_exit_in
from src.storage import atomic_folder, jsonl
from src.storage.jsonl import strict_json
from src.training.state import TrainState

log = logging.getLogger("run")


class Tracker:
    """Writes metrics.jsonl, and shows its lines and sends them to the trackers, on the main process alone."""

    def __init__(self, strategy: Strategy, cfg: RunConfig, total: int):
        accelerator = strategy.accelerator
        self.strategy, self.cfg, self.main = strategy, cfg, accelerator.is_main_process
        self.folder, self.console = Path(cfg.output_dir), Console(self.main, total)
        self.metrics = jsonl.JsonlWriter(self.folder / "metrics.jsonl")
        try:
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
            console.log_to(self.folder / "logs" / f"rank_{accelerator.process_index}.log")
        except OSError as error:
            raise UsageError(f"output_dir: {cfg.output_dir} cannot be written: {error}") from error

    def begin(self, config: str, progress: TrainState) -> None:
        """Write what is known before the first step, cut metrics.jsonl back to `progress`, start trackers and the bar."""
        record_exit_in(self.folder)
        if not self.main:
            return
        try:
            self._open(config, progress.step, progress.evaluated)
        except OSError as error:
            raise UsageError(f"output_dir: {self.folder} cannot be written: {error}") from error
        lines = jsonl.read_lines(self.metrics.path)
        trackers.start(self.strategy.accelerator, self.cfg, config, progress.step, lines)
        self.console.begin(progress.step)

    def _open(self, config: str, step: int, evaluated: int) -> None:
        atomic_folder.rewrite(self.folder / "config.yaml", config)
        known = environment(self.strategy, self.cfg)
        known["starts"] = [*self._starts(step), {"step": step, "world_size": known["world_size"], "time": time.time()}]
        atomic_folder.rewrite(self.folder / "environment.json", json.dumps(known, indent=1))
        save_diff(self.folder)
        # What came after the checkpoint is about to be computed again; so is an evaluation that it has not finished.
        done = evaluated == step
        jsonl.truncate_after(
            self.metrics.path, lambda x: x["step"] < step or (x["step"] == step and (done or x["kind"] != "eval"))
        )
        run_status.write_status(self.folder, "running", step)

    def _starts(self, step: int) -> list[dict]:
        """Return the starts of this run before, each with its step and number of processes."""
        with suppress(OSError, ValueError, KeyError):
            return json.loads((self.folder / "environment.json").read_text())["starts"] if step else []
        return []

    def step(self) -> None:
        """Move the bar by one step; costs no device sync."""
        self.console.step()

    def line(self, kind: str, step: int, values: dict) -> None:
        """Append one line to metrics.jsonl, show it, and send it to the trackers."""
        if not self.main:
            return
        plain = {k: float(v) if torch.is_tensor(v) else v for k, v in values.items()}
        values = strict_json({"kind": kind, "step": step} | plain)
        self.metrics.add(values)
        self.metrics.try_flush()
        trackers.add(values)
        log.info("%s", json.dumps(values))
        self.console.line(values)

    def say(self, text: str) -> None:
        """Print on the main process without tearing the bar."""
        if self.main and text:
            console.say(text)

    def end(self, sample: str | None, outcome: dict) -> None:
        """Close the bar; print the last numbers, the task's sample and where the run lives."""
        self.console.end()
        if not self.main:
            return
        if sample:
            self.say(f"\nA sample of the trained model:\n{'─' * 60}\n{sample}\n{'─' * 60}")
        self.metrics.try_flush()
        last = {line["kind"]: line for line in jsonl.read_lines(self.metrics.path)}
        for kind, names in (("train", ("step", "loss", "tokens_per_second")), ("eval", None)):
            if kind in last:
                chosen = {k: v for k, v in last[kind].items() if k != "kind" and (names is None or k in names)}
                self.say(f"\n{kind}\n{table({k: exact(v) for k, v in chosen.items()})}")
        with suppress(OSError):
            run_status.write_status(
                self.folder, "complete", max((line["step"] for line in last.values()), default=0), 0, **outcome
            )
        self.say(f"\nrun    {self.folder.resolve()}\nmodel  {(self.folder / 'final').resolve()}")


class Meter:
    """Sums since the last train line; the losses stay on the device until a line is written or the run is saved.

    The losses of the steps are kept apart and added in their order, so that it does not matter when they are read."""

    SUMS = ("weight", "tokens", "positions", "waited")

    def __init__(self):
        self.losses: list[float] = []  # of whole global batches
        self.pending: list[torch.Tensor] = []  # this rank's part of those after them
        self.weight = self.tokens = self.positions = self.waited = 0.0
        self.mark = time.perf_counter()

    def add(self, losses: torch.Tensor | None, weight: float, tokens: float, positions: float, waited: float) -> None:
        """Add a step: this rank's losses (None where the global batch has no weight) and the sums of all ranks."""
        self.pending += [] if losses is None else [losses.sum()]
        self.weight += weight
        self.tokens += tokens
        self.positions += positions
        self.waited += waited

    @contextmanager
    def paused(self):
        """Within, time does not count: evaluation and saving are no part of the throughput of training."""
        began = time.perf_counter()
        yield
        self.mark += time.perf_counter() - began

    def settle(self, host_group) -> None:
        """Add up over the ranks what is pending: one wait for the device, one small vector."""
        if self.pending:
            self.losses += host_group.sum(torch.stack(self.pending).cpu()).tolist()
            self.pending = []

    def state(self, host_group) -> dict:
        """Return all of it as numbers, the same on every rank but for the times."""
        self.settle(host_group)
        sums = {name: getattr(self, name) for name in self.SUMS}
        return sums | {"losses": self.losses.copy(), "seconds": time.perf_counter() - self.mark}

    def resume(self, state: dict) -> None:
        """Go on from what `state` returned."""
        self.losses = [float("nan") if loss is None else loss for loss in state["losses"]]
        self.mark = time.perf_counter() - state["seconds"]
        for name in self.SUMS:
            setattr(self, name, state[name])

    def line(self, host_group) -> dict:
        """Return the numbers of a train line, the same on every rank but for the times, and start anew."""
        self.settle(host_group)
        seconds = time.perf_counter() - self.mark
        values = {
            "loss": sum(self.losses) / self.weight if self.weight else None,
            "weight": self.weight,
            "tokens_per_second": self.tokens / seconds,
            "padding": 1 - self.tokens / self.positions if self.positions else None,
            "data_seconds": self.waited,
            "seconds": seconds,
        }
        self.__init__()
        return values
