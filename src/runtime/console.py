"""Console output: progress bars on a terminal, complete lines in a file, and the log file of each rank.

Edit the printed lines here. Tests: tests/runtime/test_console.py.
"""

import logging
import os
import sys
import time
from datetime import datetime, timedelta
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from src.config.redact import redact

LINE_SECONDS = 10.0  # between two progress lines of the same work, if the output is not a terminal
PROGRESS_BAR_VARIABLES = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
KIND_NAMES = {"eval": "evaluation"}

log = logging.getLogger("run")


def is_terminal() -> bool:
    """Return True if stdout and stderr are a terminal. Files and pipes get no progress bars."""
    return sys.stdout.isatty() and sys.stderr.isatty()


# ---- logging ---------------------------------------------------------------------------------------------------------


_buffered = MemoryHandler(1000, flushLevel=sys.maxsize, flushOnClose=False)  # messages before there is a log file


def prepare() -> None:
    """Keep progress bars and log messages of libraries off the console. Buffer the messages for the log file."""
    if not is_terminal():
        os.environ.update(dict.fromkeys(PROGRESS_BAR_VARIABLES, "1"))
    logging.getLogger().handlers[:] = [_buffered]
    logging.captureWarnings(True)
    reroute()


def reroute() -> None:
    """Send log messages of libraries to the log file only; call this after imports, which may add console handlers."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if not isinstance(logger, logging.Logger) or (name.startswith("torch") and "TORCH_LOGS" in os.environ):
            continue
        for handler in list(logger.handlers):
            # Any stream: stderr may have been another one when the library was imported.
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                logger.removeHandler(handler)
                logger.propagate = True


class _RedactingFormatter(logging.Formatter):
    def format(self, record) -> str:
        return redact(super().format(record))


def log_to(file: Path) -> None:
    """Write the log of this process to `file` from now on, starting with the buffered messages."""
    handler = logging.FileHandler(file)
    handler.handleError = lambda record: None  # ignore a full disk: the important messages are printed, too
    handler.setFormatter(_RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    _buffered.setTarget(handler)
    _buffered.flush()
    logging.getLogger().handlers[:] = [handler]
    log.setLevel(logging.INFO)


# ---- lines and bars --------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print complete lines, above a progress bar if there is one, and log them. Not thread-safe."""
    log.info("%s", text)
    if is_terminal() and "tqdm" in sys.modules:
        sys.modules["tqdm"].tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()
    else:  # one write, because other threads print, too; text from a model or file may contain \r
        print(text.replace("\r", "") + "\n", end="", flush=True)


def stamped(text: str) -> None:
    """Print an event; if the output is not a terminal, with the time."""
    say(text if is_terminal() else f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}")


class _ProgressLines:
    """Replaces a progress bar if there is no terminal: prints a line every LINE_SECONDS."""

    def __init__(self, what: str, total: int | None, shown: bool):
        self.what, self.n, self.shown = what, 0, shown
        self.of_total = "" if total is None else f" of {total:,}"
        self.last_line = time.monotonic()

    def update(self, n: int = 1) -> None:
        self.n += n
        if self.shown and time.monotonic() - self.last_line >= LINE_SECONDS:
            self.last_line = time.monotonic()
            stamped(f"{self.what}: {self.n:,}{self.of_total}")

    def close(self) -> None: ...


def bar(what: str, total: int | None, unit: str, shown: bool = True, **options):
    """Return a tqdm progress bar, or an object with the same `n`, `update` and `close` that prints lines or nothing."""
    if not shown or not is_terminal():
        return _ProgressLines(what, total, shown)
    from tqdm import tqdm

    return tqdm(
        total=total, desc=what, unit=unit, **{"mininterval": 0.2, "dynamic_ncols": True, "leave": False} | options
    )


class Console:
    """Shows the progress of one training run on the main process; does nothing on the others."""

    def __init__(self, shown: bool, total: int, unit: str, step: int):
        """Show the progress bar of training, starting at `step`."""
        self.total, self.unit, self.first_step, self.start = total, unit, step, time.monotonic()
        shows_bar = shown and is_terminal()
        self.bar: Any = bar("training", total, "step", initial=step, leave=True) if shows_bar else None

    def step(self) -> None:
        if self.bar is not None:
            self.bar.update()

    def line(self, line: dict) -> None:
        """Print one line of metrics.jsonl in readable form."""
        if line["kind"] == "train":
            self._train_line(line)
            return
        names = [k for k in line if k not in ("kind", "step", "epoch")]
        groups: dict[str, list[str]] = {}  # by source of a mixture, or average of weights
        for group, _, name in (k.rpartition("/") for k in names if isinstance(line[k], int | float | None)):
            groups.setdefault(group, []).append(f"{name} {number(line[f'{group}/{name}' if group else name])}")
        numbers = "; ".join(f"{group}: " * bool(group) + ", ".join(texts) for group, texts in groups.items())
        stamped(f"{KIND_NAMES.get(line['kind'], line['kind'])} at step {line['step']}: {numbers}")

    def _train_line(self, line: dict) -> None:
        loss, speed = number(line["loss"]), f"{line['tokens_per_second']:,.0f}"
        rate = "none" if line["learning_rate"] is None else f"{line['learning_rate']:.1e}"
        if self.bar is not None:
            self.bar.set_postfix({"loss": loss, "lr": rate, f"{self.unit}/s": speed}, refresh=False)
            return
        step = line["step"]
        seconds_per_step = (time.monotonic() - self.start) / max(1, step - self.first_step)
        eta = timedelta(seconds=round(seconds_per_step * (self.total - step)))
        mfu = f" mfu {line['mfu']:.1%}" if "mfu" in line else ""
        stamped(f"step {step}/{self.total} loss {loss} lr {rate} {speed} {self.unit}/s{mfu} ETA {eta}")

    def end(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


# ---- numbers ---------------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Format a number with few digits, for the console."""
    if value is None:
        return "none"
    if isinstance(value, int) or float(value).is_integer():
        return f"{value:,}"
    return f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.3e}"


def exact(value) -> str:
    """Format a number with all its digits."""
    return f"{value:,}" if isinstance(value, int) else str(value)


def in_unit(line: dict, unit: str) -> dict:
    """Return a line of metrics.jsonl to show, in what the task counts: `pixels_per_second` for tokens_per_second."""
    return {name.replace("tokens_per", f"{unit}_per"): value for name, value in line.items()}


def table(rows: dict) -> str:
    """Format (name, value) pairs as two aligned text columns."""
    width = max(len(name) for name in rows)
    return "\n".join(f"  {name.replace('_', ' '):<{width}}  {value}" for name, value in rows.items())
