"""Console output: bars on a terminal, complete lines in a file, the log file of each rank.

A fork changes the lines here. Tests: tests/runtime/test_console.py.
"""

import logging
import os
import sys
import time
from datetime import datetime, timedelta
from logging.handlers import MemoryHandler
from pathlib import Path

from src.config.redact import redact

EVERY = 10.0  # seconds between two lines about the same thing, where there is no terminal

log = logging.getLogger("run")


def terminal() -> bool:
    """Return whether a person watches: a bar belongs neither into a file nor into a pipe."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def prepare() -> None:
    """Keep bars and remarks of other libraries out of what is printed; remarks go to the log file, once there is one."""
    if not terminal():
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ[name] = "1"
    logging.getLogger().handlers[:] = [MemoryHandler(1000, flushLevel=sys.maxsize, flushOnClose=False)]
    logging.captureWarnings(True)
    reroute()


def reroute() -> None:
    """Send what other libraries log to the log file alone; called after they are imported, when they may have begun to print."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and not (name.startswith("torch") and "TORCH_LOGS" in os.environ):
            printing = [h for h in logger.handlers if getattr(h, "stream", None) in (sys.stdout, sys.stderr)]
            for handler in printing:
                logger.removeHandler(handler)
                logger.propagate = True


class _Redacting(logging.Formatter):
    def format(self, record) -> str:
        return redact(super().format(record))


def log_to(file: Path) -> None:
    """From now on, write the log of this process to `file`; what it has logged before comes first."""
    handler = logging.FileHandler(file)
    handler.handleError = lambda record: None  # a full disk: what matters was printed, too
    handler.setFormatter(_Redacting("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    early = [record for old in root.handlers if isinstance(old, MemoryHandler) for record in old.buffer]
    root.handlers[:] = [handler]
    for record in early:
        handler.handle(record)
    log.setLevel(logging.INFO)


def unwritten() -> str:
    """Return the warnings that no log file has taken, for a process that fails before there is one."""
    held = [old for old in logging.getLogger().handlers if isinstance(old, MemoryHandler)]
    records = [record for old in held for record in old.buffer if record.levelno >= logging.WARNING]
    return "".join(f"{record.name}: {record.getMessage().strip()}\n" for record in records if record.name != log.name)


def say(text: str) -> None:
    """Print complete lines, above the bar where there is one, and keep them in the log file; one thread at a time."""
    log.info("%s", text)
    if terminal() and "tqdm" in sys.modules:
        sys.modules["tqdm"].tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()
    else:  # in one piece: other threads print, too; and what a model or a file says may hold anything
        print(text.replace("\r", "") + "\n", end="", flush=True)


def stamped(text: str) -> None:
    """Say something that happened; in a file, with the time."""
    say(text if terminal() else f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}")


class _Lines:
    """Stands in for a bar where there is no terminal: a line every EVERY seconds, the first not before."""

    def __init__(self, what: str, total: int | None, unit: str, n: int, scale: bool):
        self.what, self.total, self.unit, self.n, self.scale = what, total, unit, n, scale
        self.began = self.said = time.monotonic()
        self.first = n

    def update(self, n: int = 1) -> None:
        self.n += n
        now = time.monotonic()
        if now - self.said < EVERY:
            return
        self.said = now
        total = "" if self.total is None else f" of {self._number(self.total)}"
        stamped(f"{self.what}: {self._number(self.n)}{total} {self.unit}{self._left(now)}")

    def _number(self, n: int) -> str:
        return f"{n / 1e6:,.1f} M" if self.scale else f"{n:,}"

    def _left(self, now: float) -> str:
        done = self.n - self.first
        return f", ETA {eta((self.total - self.n) * (now - self.began) / done)}" if self.total and done else ""

    def set_postfix(self, *_, **__) -> None: ...

    def close(self) -> None: ...


class _Silent(_Lines):
    def update(self, n: int = 1) -> None:
        self.n += n


def bar(what: str, total: int | None, unit: str, initial: int = 0, shown: bool = True, scale: bool = False, **options):
    """Return something with `n`, `update` and `close` that shows how far `what` is: a bar, or lines in a file."""
    if not shown:
        return _Silent(what, total, unit, initial, scale)
    if not terminal():
        return _Lines(what, total, _PLURAL.get(unit, f"{unit}s"), initial, scale)
    from tqdm import tqdm

    options = {"mininterval": 0.2, "dynamic_ncols": True, "leave": False, "unit_scale": scale} | options
    return tqdm(total=total, initial=initial, desc=what, unit=unit, **options)


def eta(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


class Console:
    """The lines of one training run, on the main process; on the others it says nothing."""

    def __init__(self, shown: bool, total: int):
        self.shown, self.total = shown, total
        self.bar = None

    def begin(self, step: int) -> None:
        """Show the bar of training, from `step` on."""
        self.first, self.began = step, time.monotonic()
        if self.shown and terminal():
            self.bar = bar("training", self.total, "step", step, leave=True)

    def step(self) -> None:
        if self.bar is not None:
            self.bar.update()

    def line(self, line: dict) -> None:
        """Show a line of metrics.jsonl."""
        if line["kind"] != "train":
            names = [k for k in line if k not in ("kind", "step", "epoch")]
            numbers = ", ".join(f"{k} {number(line[k])}" for k in names if isinstance(line[k], int | float | None))
            return stamped(f"{_EVENTS.get(line['kind'], line['kind'])} at step {line['step']}: {numbers}")
        loss, rate, speed = number(line["loss"]), line["learning_rate"], f"{line['tokens_per_second']:,.0f}"
        rate = "none" if rate is None else f"{rate:.1e}"
        if self.bar is not None:
            return self.bar.set_postfix({"loss": loss, "lr": rate, "tokens/s": speed}, refresh=False)
        step = line["step"]
        left = (time.monotonic() - self.began) * (self.total - step) / max(1, step - self.first)
        stamped(f"step {step}/{self.total} loss {loss} lr {rate} {speed} tokens/s ETA {eta(left)}")

    def end(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


_EVENTS = {"eval": "evaluation"}
_PLURAL = {"B": "B", "batch": "batches"}


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


def table(rows: dict) -> str:
    """Return two aligned columns."""
    width = max(len(name) for name in rows)
    return "\n".join(f"  {name.replace('_', ' '):<{width}}  {value}" for name, value in rows.items())
