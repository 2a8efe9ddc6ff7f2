"""Console output: complete lines with the time, and the log file of each rank.

Tests: tests/engine/process/test_console.py.
"""

import logging
import os
import sys
import time
from datetime import datetime, timedelta
from logging.handlers import MemoryHandler
from pathlib import Path

LINE_SECONDS = 10.0  # between two progress lines of the same work
PROGRESS_BAR_VARIABLES = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")

log = logging.getLogger("run")


# ---- logging ---------------------------------------------------------------------------------------------------------


_buffered = MemoryHandler(1000, flushLevel=sys.maxsize, flushOnClose=False)  # messages before there is a log file


def prepare() -> None:
    """Keep log messages of libraries off the console, and progress bars out of files. Buffer messages for the log file."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
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


def log_to(file: Path) -> None:
    """Write the log of this process to `file` from now on, starting with the buffered messages."""
    handler = logging.FileHandler(file)
    handler.handleError = lambda record: None  # ignore a full disk: the important messages are printed, too
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    _buffered.setTarget(handler)
    _buffered.flush()
    logging.getLogger().handlers[:] = [handler]
    log.setLevel(logging.INFO)


# ---- lines -----------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print complete lines and log them."""
    log.info("%s", text)
    print(text + "\n", end="", flush=True)  # one write, because other threads print, too


def stamped(text: str) -> None:
    """Print an event with the time."""
    say(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}")


class Progress:
    """Prints a line about long work every LINE_SECONDS."""

    def __init__(self, what: str, total: int | None, unit: str, shown: bool = True):
        self.what = what
        self.n = 0
        self.of_total = unit if total is None else f"of {total:,} {unit}"
        self.shown = shown
        self.last_line = time.monotonic()

    def update(self, n: int = 1) -> None:
        self.n += n
        if self.shown and time.monotonic() - self.last_line >= LINE_SECONDS:
            self.last_line = time.monotonic()
            stamped(f"{self.what}: {self.n:,} {self.of_total}")


class Console:
    """Prints the lines of metrics.jsonl of one training run in readable form."""

    def __init__(self, total: int, unit: str, step: int):
        self.total = total
        self.unit = unit
        self.first_step = step
        self.start = time.monotonic()

    def line(self, line: dict) -> None:
        step = line["step"]
        if line["kind"] == "train":
            rate = "none" if line["learning_rate"] is None else f"{line['learning_rate']:.1e}"
            seconds_per_step = (time.monotonic() - self.start) / max(1, step - self.first_step)
            eta = timedelta(seconds=min(round(seconds_per_step * (self.total - step)), 10**13))  # near its limit
            speed = f"{line['tokens_per_second']:,.0f} {self.unit}/s" + (
                f" mfu {line['mfu']:.1%}" if "mfu" in line else ""
            )
            stamped(f"step {step}/{self.total} loss {number(line['loss'])} lr {rate} {speed} ETA {eta}")
        else:
            numbers = {name: line[name] for name in line if isinstance(line[name], int | float | None)}
            texts = [f"{name} {number(numbers[name])}" for name in numbers if name not in ("step", "epoch")]
            stamped(f"evaluation at step {step}: {', '.join(texts)}")

    def samples(self, step: int, samples: list[tuple[str, str]]) -> None:
        """Print prompts and their answers."""
        stamped("\n".join([f"samples at step {step}:", *(sample(*each) for each in samples)]))


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


def sample(prompt: str, answer: str) -> str:
    """Format a prompt and its answer, indented."""
    lines = [f"  > {line}" for line in prompt.splitlines()]
    lines += [f"    {line}" for line in answer.splitlines() or ["(no text)"]]
    return "\n".join(lines)


def table(rows: dict) -> str:
    """Format (name, value) pairs as two aligned text columns."""
    width = max(len(name) for name in rows)
    return "\n".join(f"  {name.replace('_', ' '):<{width}}  {value}" for name, value in rows.items())
