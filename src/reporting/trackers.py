"""Trackers (wandb, tensorboard, …), each in a background thread, so that none can delay or end a run.

The trackers are Accelerate's; docs/tracking.md says which project, run name and id they get.
Tests: tests/reporting/test_trackers.py and tests/reporting/test_wandb.py.
"""

import hashlib
import json
import logging
import os
import queue
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from src.config.errors import one_line, warn
from src.config.paths import REPOSITORY
from src.config.redact import redact_all
from src.config.schema import RunConfig
from src.runtime.exit_codes import on_exit
from src.storage import atomic_folder

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

START_TIMEOUT = 10.0  # seconds that the first step waits for trackers to start
CLOSE_TIMEOUT = 10.0  # seconds that a process waits at its end for trackers to close
MAX_QUEUED = 100_000  # lines per tracker; a tracker that falls further behind loses lines
FILE = "trackers.json"  # in the run folder: run id, and for each tracker the last step up to which it has all lines

log = logging.getLogger("run")
_threads: list["_TrackerThread"] = []
_close_deadlines: list[float] = []  # set by the first close(), kept by later calls


class _TrackerThread:
    """One tracker, its queue of lines, and the thread that makes every call to it, in order."""

    def __init__(self, name: str, create: Callable[[], "GeneralTracker"], on_closed: Callable[[str, int], None]):
        self.name, self.create, self.on_closed = name, create, on_closed
        self.queue: queue.SimpleQueue = queue.SimpleQueue()  # (values, step) of each line; None ends the thread
        self.queued = self.sent = 0
        self.failed: str | None = None  # the first failure, as in "could not start"
        self.call_began: float | None = time.monotonic()  # start of the current call; None between calls
        self.started = threading.Event()  # also set when the start failed
        self.warned = False
        self.pid = os.getpid()  # a forked dataloader worker has a copy of this object, but not the thread
        self.thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self.thread.start()

    def add(self, values: dict, step: int) -> None:
        """Queue one line; return at once."""
        if self.pid != os.getpid():
            return
        self.queued += 1
        if self.queued - self.sent <= MAX_QUEUED and self.thread.is_alive():
            self.queue.put((values, step))

    def _run(self) -> None:
        started = self._try("could not start", self._start)
        self.started.set()
        if not started:
            return
        last_step = 0
        while (line := self.queue.get()) is not None:
            values, last_step = line
            self.sent += self._try("could not log a line", self.tracker.log, values, step=last_step)
        if self._try("could not close", self.tracker.finish) and self.sent == self.queued:
            self.on_closed(self.name, last_step)

    def _start(self) -> None:
        self.tracker = self.create()

    def _try(self, what: str, call: Callable, *args, **kwargs) -> bool:
        """Return True if the call raised nothing. Warn about the first error; all errors go to the log file."""
        self.call_began = time.monotonic()
        try:
            call(*args, **kwargs)
            return True
        except BaseException as error:  # SystemExit too: nothing above would catch it in a thread
            text = f"report_to: {self.name} {what} ({type(error).__name__}: {one_line(error)})"
            log.warning("%s", text, exc_info=self.failed is None)
            if self.failed is None:
                self.failed = what
                warn(f"{text}; training continues, and metrics.jsonl has every line")
            return False
        finally:
            self.call_began = None

    def close(self, deadline: float) -> bool:
        """Return True if the tracker closed before the deadline; warn about lines that it did not log."""
        if self.pid != os.getpid():
            return True
        if began := self.call_began:  # a call that already hangs gets only the rest of CLOSE_TIMEOUT
            deadline = min(deadline, max(began + CLOSE_TIMEOUT, time.monotonic() + 1))
        self.thread.join(max(0.0, deadline - time.monotonic()))
        alive, missing = self.thread.is_alive(), self.queued - self.sent
        if not self.warned and (alive or (missing and self.failed != "could not start")):
            self.warned = True
            what = f"has not logged {missing} of {self.queued} lines" if missing else "has not closed"
            late = " before its deadline" if alive else ""
            warn(f"report_to: {self.name} {what}{late}; metrics.jsonl has all of them")
        return not alive


def start(accelerator: "Accelerator", cfg: RunConfig, config: str, step: int, lines: list[dict]) -> None:
    """Start the trackers of `report_to` and send them the lines that they may lack; main process only.

    `config` is the resolved YAML, `step` the step that the run resumes from. Wait up to START_TIMEOUT until all have
    started, because their packages must be imported before dataloader workers are forked."""
    if not accelerator.log_with:
        return
    folder = Path(cfg.output_dir).resolve()
    known, lock = _run_identity(folder, config, step), threading.Lock()

    def on_closed(name: str, last_step: int) -> None:
        with lock, suppress(OSError):
            known["complete"][name] = max(last_step, known["complete"].get(name, 0))
            atomic_folder.rewrite(folder / FILE, json.dumps(known))

    _threads.clear()
    _close_deadlines.clear()
    on_exit(close)
    sys.argv[1:] = []  # wandb uploads the command line, and a URL in it may carry a signature
    settings = _settings(cfg, folder, known["run_id"])
    with _no_stdin():
        for name in map(str, accelerator.log_with):
            complete = known["complete"].get(name, 0)
            options = dict(settings.get(name, {}))
            if name == "tensorboard":
                options["purge_step"] = complete + 1
            thread = _TrackerThread(name, partial(_create, accelerator, cfg, name, folder, options), on_closed)
            for line in lines:
                if line["step"] > complete:
                    thread.add(*_numbers(line))
            _threads.append(thread)
        deadline = time.monotonic() + START_TIMEOUT
        for thread in _threads:
            if not thread.started.wait(max(0.0, deadline - time.monotonic())):
                warn(f"report_to: {thread.name} has not started in {START_TIMEOUT:g} s; training does not wait for it")


@contextmanager
def _no_stdin():
    """Replace stdin with an empty file, so that a tracker that asks for a password does not wait forever."""
    terminal = sys.stdin
    with open(os.devnull) as empty:
        sys.stdin = empty
        try:
            yield
        finally:
            sys.stdin = terminal


def _create(accelerator: "Accelerator", cfg: RunConfig, name: str, folder: Path, options: dict) -> "GeneralTracker":
    """Start and return one tracker as Accelerator.init_trackers does, but separately, so that none blocks another."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    project = cfg.project or os.environ.get("WANDB_PROJECT") or REPOSITORY.name
    tracker_class, where = LOGGER_TYPE_TO_CLASS[name], []
    if tracker_class.requires_logging_directory:  # the project becomes a folder name
        project, where = re.sub(r"[^\w.-]+", "_", project), [str(folder / "trackers")]
    tracker = tracker_class(project, *where, **options)
    tracker.start()
    accelerator.trackers.append(tracker)  # for accelerator.get_tracker
    values = redact_all(vars(cfg))
    simple = (int, float, str, bool)
    tracker.store_init_configuration({k: v if isinstance(v, simple) else str(v) for k, v in values.items()})
    with suppress(Exception):
        if url := getattr(tracker.tracker, "url", None):
            print(f"{name}: {url}", flush=True)
    return tracker


def _run_identity(folder: Path, config: str, step: int) -> dict:
    """Return the run id, and for each tracker the last step up to which it has all lines; a new run gets a new id.

    A run that was killed before its first checkpoint keeps its id if its configuration is unchanged."""
    digest = hashlib.sha256(config.encode()).hexdigest()[:16]
    known: dict = atomic_folder.read_json(folder / FILE)
    if not (known.get("run_id") and (step or known.get("config") == digest)):
        known = {"run_id": uuid.uuid4().hex}
    complete = {name: min(last, step) for name, last in known.get("complete", {}).items()}  # later lines are sent again
    known = {"run_id": known["run_id"], "config": digest, "complete": complete}
    with suppress(OSError):
        atomic_folder.rewrite(folder / FILE, json.dumps(known))
    return known


def _settings(cfg: RunConfig, folder: Path, run_id: str) -> dict[str, dict]:
    """Return the options of each tracker; wandb's environment variables win over our defaults."""
    name = cfg.run_name or folder.name
    options = {"id": ("RUN_ID", run_id), "resume": ("RESUME", "allow"), "dir": ("DIR", str(folder))}
    wandb = {option: value for option, (variable, value) in options.items() if not os.environ.get(f"WANDB_{variable}")}
    if cfg.run_name or not os.environ.get("WANDB_NAME"):
        wandb["name"] = name
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_CONSOLE", "off")  # do not upload the console output as well
    os.environ.setdefault("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "1")  # a kill loses the last 1 s, not 15 s
    return {"wandb": wandb, "mlflow": {"run_name": name}}


def add(line: dict) -> None:
    """Queue a line of metrics.jsonl for every tracker; return at once."""
    for thread in _threads:
        thread.add(*_numbers(line))


def _numbers(line: dict) -> tuple[dict, int]:
    """Return the numbers of a line under their tracker names (`train/loss`), and its step."""
    numbers = {k: v for k, v in line.items() if isinstance(v, int | float) and k not in ("step", "kind")}
    return {f"{line['kind']}/{name}": value for name, value in numbers.items()}, line["step"]


def close(seconds: float | None = None) -> bool:
    """Close all trackers; return True if all closed within `seconds` (default CLOSE_TIMEOUT). Call it before exit.

    Any thread may call it, even several times. Later calls keep the deadline of the first call."""
    deadline = time.monotonic() + (CLOSE_TIMEOUT if seconds is None else seconds)
    if _threads and not _close_deadlines:
        _close_deadlines.append(deadline)
    deadline = min([deadline, *_close_deadlines])
    for thread in _threads:
        thread.queue.put(None)
    closed = [thread.close(deadline) for thread in _threads]  # a list, so that all close even if the first one does not
    return all(closed)
