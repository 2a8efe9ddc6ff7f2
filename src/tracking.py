"""What a run says: the table at its start, the progress bar, metrics.jsonl, log files, trackers, environment.json.

A fork adds numbers to the lines here. Guarded by tests/test_tracking.py.
"""

import json
import logging
import math
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from src import status, store
from src.environment import environment
from src.fields import RunConfig
from src.inputs import UsageError, warn
from src.launch import owns
from src.progress import Progress

log = logging.getLogger("run")


def strict(value):
    """Return `value` as strict JSON allows it: numbers that are not finite become None."""
    if isinstance(value, dict):
        return {key: strict(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Tracker:
    """Writes metrics.jsonl and the progress bar on the main process, and nothing on the others."""

    def __init__(self, accelerator, run: RunConfig, total: int):
        self.accelerator, self.run, self.main = accelerator, run, accelerator.is_main_process
        self.folder, self.total, self.bar = Path(run.output_dir), total, None
        self.metrics = store.Lines(self.folder / "metrics.jsonl")
        try:
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
            _log_to(self.folder / "logs" / f"rank_{accelerator.process_index}.log")
        except OSError as error:
            raise UsageError(f"output_dir: {run.output_dir} cannot be written: {error}") from error

    def begin(self, config: str, progress: Progress) -> None:
        """Write what is known before the first step, cut metrics.jsonl back to `progress`, and show the progress bar."""
        owns(self.folder)
        if not self.main:
            return
        try:
            self._open(config, progress.step, progress.evaluated)
        except OSError as error:
            raise UsageError(f"output_dir: {self.folder} cannot be written: {error}") from error
        if self.run.report_to:
            _best_effort("init", self.accelerator.init_trackers, self.folder.name, config=_flat(self.run))
        from tqdm import tqdm

        interval = 0.2 if sys.stderr.isatty() else 10.0  # a log file gets a line now and then
        options = {"unit": "step", "mininterval": interval, "dynamic_ncols": True, "desc": "training"}
        self.bar = tqdm(total=self.total, initial=progress.step, **options)

    def _open(self, config: str, step: int, evaluated: int) -> None:
        store.rewrite(self.folder / "config.yaml", config)
        known = environment(self.accelerator, self.run)
        known["starts"] = [*self._starts(step), {"step": step, "world_size": known["world_size"], "time": time.time()}]
        store.rewrite(self.folder / "environment.json", json.dumps(known, indent=1))
        # What came after the checkpoint is about to be computed again; so is an evaluation that it has not finished.
        done = evaluated == step
        store.cut_back(
            self.metrics.path, lambda x: x["step"] < step or (x["step"] == step and (done or x["kind"] != "eval"))
        )
        status.write(self.folder, "running", step)

    def _starts(self, step: int) -> list[dict]:
        """Return the starts of this run before, each with its step and number of processes."""
        with suppress(OSError, ValueError, KeyError):
            return json.loads((self.folder / "environment.json").read_text())["starts"] if step else []
        return []

    def step(self) -> None:
        """Move the bar by one step; costs no device sync."""
        if self.bar is not None:
            self.bar.update()

    def line(self, kind: str, step: int, values: dict) -> None:
        """Append one line to metrics.jsonl, show it, and send it to the trackers."""
        if not self.main:
            return
        plain = {k: float(v) if torch.is_tensor(v) else v for k, v in values.items()}
        values = strict({"kind": kind, "step": step} | plain)
        self.metrics.add(values)
        self.metrics.offer()
        numbers = {k: v for k, v in values.items() if isinstance(v, int | float) and k not in ("step", "kind")}
        if self.run.report_to:
            _best_effort("log", self.accelerator.log, {f"{kind}/{k}": v for k, v in numbers.items()}, step=step)
        log.info("%s", json.dumps(values))
        if self.bar is not None and kind == "train":
            shown = {
                "loss": number(values["loss"]),
                "lr": number(values["learning_rate"]),
                "tok/s": f"{values['tokens_per_second']:,.0f}",
            }
            self.bar.set_postfix(shown, refresh=False)
        elif kind != "train":
            self.say(
                f"step {step} {kind}: " + " · ".join(f"{k} {number(v)}" for k, v in numbers.items() if k != "epoch")
            )

    def say(self, text: str) -> None:
        """Print on the main process without tearing the bar."""
        if self.main:
            log.info("%s", text)
            print(text, flush=True) if self.bar is None else self.bar.write(text, file=sys.stdout)

    def end(self, sample: str | None, outcome: dict) -> None:
        """Close the bar; print the last numbers, the task's sample and where the run lives."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        if not self.main:
            return
        if sample:
            self.say(f"\nA sample of the trained model:\n{'─' * 60}\n{sample}\n{'─' * 60}")
        self.metrics.offer()
        last = {line["kind"]: line for line in store.objects(self.metrics.path)}
        for kind, names in (("train", ("step", "loss", "tokens_per_second")), ("eval", None)):
            if kind in last:
                chosen = {k: v for k, v in last[kind].items() if k != "kind" and (names is None or k in names)}
                self.say(f"\n{kind}\n{table({k: exact(v) for k, v in chosen.items()})}")
        with suppress(OSError):
            status.write(
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

    def settle(self, agree) -> None:
        """Add up over the ranks what is pending: one wait for the device, one small vector."""
        if self.pending:
            self.losses += agree(torch.stack(self.pending).cpu()).tolist()
            self.pending = []

    def state(self, agree) -> dict:
        """Return all of it as numbers, the same on every rank but for the times."""
        self.settle(agree)
        sums = {name: getattr(self, name) for name in self.SUMS}
        return sums | {"losses": self.losses.copy(), "seconds": time.perf_counter() - self.mark}

    def resume(self, state: dict) -> None:
        """Go on from what `state` returned."""
        self.losses = [float("nan") if loss is None else loss for loss in state["losses"]]
        self.mark = time.perf_counter() - state["seconds"]
        for name in self.SUMS:
            setattr(self, name, state[name])

    def line(self, agree) -> dict:
        """Return the numbers of a train line, the same on every rank but for the times, and start anew."""
        self.settle(agree)
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


def number(value) -> str:
    """Return a number as a person reads it."""
    if value is None:
        return "none"
    return (
        f"{value:,}"
        if isinstance(value, int) or float(value).is_integer()
        else f"{value:.4f}"
        if abs(value) >= 1e-3
        else f"{value:.3e}"
    )


def exact(value) -> str:
    """Return a number to the last digit."""
    return f"{value:,}" if isinstance(value, int) else str(value)


def _best_effort(what: str, call, *args, **kwargs) -> None:
    """Call a tracker; its failure is a warning, never the end of a run."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        warn(f"tracker {what} failed, training goes on: {error}")


def _flat(run: RunConfig) -> dict:
    return {k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in vars(run).items()}


def _log_to(file: Path) -> None:
    handler = logging.FileHandler(file)
    handler.handleError = lambda record: None  # a full disk: the same line was printed, too
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    logging.captureWarnings(False)


def table(rows: dict) -> str:
    """Return two aligned columns."""
    width = max(len(name) for name in rows)
    return "\n".join(f"  {name.replace('_', ' '):<{width}}  {value}" for name, value in rows.items())
