"""Trackers (wandb, tensorboard, …): one thread each, so that none can delay or end a run.

The trackers are Accelerate's. What reaches them under which project, name and id: docs/tracking.md.
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
from contextlib import suppress
from pathlib import Path

from src.config.errors import warn
from src.config.paths import REPOSITORY
from src.config.redact import redact_all
from src.config.schema import RunConfig
from src.runtime.exit_hooks import on_exit
from src.storage import atomic_folder

START = 10.0  # seconds that the first step waits for trackers to start
CLOSE = 10.0  # seconds that the end of a process waits for them
BACKLOG = 100_000  # lines that a slow tracker may be behind
FILE = "trackers.json"  # in the run folder: the run id, and for each tracker the step up to which it has every line

log = logging.getLogger("run")
_senders: list["_Sender"] = []
_closing: list[float] = []  # the moment at which close() gives up, once it was called


class _Sender:
    """One tracker, its waiting lines, and the thread that makes every call to it, in order."""

    def __init__(self, kind: str, make: Callable, closed: Callable):
        self.kind, self.lines = kind, queue.SimpleQueue()
        self.offered = self.taken = 0
        self.error: str | None = None  # the first one
        self.since: float | None = time.monotonic()  # when the call under way began
        self.ready, self.reported, self.pid = threading.Event(), False, os.getpid()
        self.thread = threading.Thread(target=self._work, args=(make, closed), name=f"tracker {kind}", daemon=True)
        self.thread.start()

    def add(self, values: dict, step: int) -> None:
        """Queue one line; returns at once."""
        if self.pid == os.getpid():
            self.offered += 1
            if self.offered - self.taken <= BACKLOG and self.thread.is_alive():
                self.lines.put((values, step))

    def _work(self, make: Callable, closed: Callable) -> None:
        started = self._try("does not start", lambda: setattr(self, "tracker", make()))
        self.since, last = None, 0
        self.ready.set()
        while started and (line := self.lines.get()) is not None:
            self.since, (values, last) = time.monotonic(), line
            self.taken += self._try("does not take a line", self.tracker.log, values, step=last)
            self.since = None
        if started:
            self.since = time.monotonic()
            if self._try("does not close", self.tracker.finish) and self.taken == self.offered:
                closed(self.kind, last)

    def _try(self, what: str, call: Callable, *args, **kwargs) -> bool:
        """Return whether the call raised nothing; the first error is a warning, the others are in the log file."""
        try:
            call(*args, **kwargs)
            return True
        except BaseException as error:  # a thread has no other place for a SystemExit, either
            text = f"report_to: {self.kind} {what} ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
            log.warning("%s", text, exc_info=self.error is None)
            if self.error is None:
                self.error = what
                warn(f"{text}; training goes on, and metrics.jsonl has every line")
            return False

    def close(self, until: float) -> bool:
        """Return whether the tracker is closed, at the latest at `until`; warn about lines that it did not take."""
        if self.pid != os.getpid():
            return True
        if self.since:  # a call that hangs since long before needs no further patience
            until = min(until, max(self.since + CLOSE, time.monotonic() + 1))
        self.thread.join(max(0.0, until - time.monotonic()))
        alive, missing = self.thread.is_alive(), self.offered - self.taken
        if not self.reported and (alive or (missing and self.error != "does not start")):
            self.reported = True
            took = f"has not taken {missing} of {self.offered} lines" if missing else "has not closed"
            warn(f"report_to: {self.kind} {took}{' in time' * alive}; metrics.jsonl has every line")
        return not alive


def start(accelerator, cfg: RunConfig, config: str, step: int, lines: list[dict]) -> None:
    """Start every tracker of `report_to` on this process, and send it the lines of this run that it may not have yet.

    `config` is the resolved YAML, `step` where the run continues. Returns when all have started, after START seconds
    at the latest: packages are imported by then, so that no loader process is forked in the middle of an import."""
    if not accelerator.log_with:
        return
    folder = Path(cfg.output_dir).resolve()
    known = _identity(folder, config, step)
    project = cfg.project or os.environ.get("WANDB_PROJECT") or REPOSITORY.name
    settings, lock = _settings(cfg, folder, known["run_id"]), threading.Lock()

    def closed(kind: str, last: int) -> None:
        with lock, suppress(OSError):
            known["complete"][kind] = max(last, known["complete"].get(kind, 0))
            atomic_folder.rewrite(folder / FILE, json.dumps(known))

    _senders.clear()
    _closing.clear()
    on_exit(close)
    sys.argv[1:] = []  # wandb uploads the command line, and a URL in there may carry a signature
    terminal, sys.stdin = sys.stdin, open(os.devnull)  # noqa: SIM115 (a tracker that asks for a key would wait for ever)
    for kind in map(str, accelerator.log_with):
        complete = min(step, known["complete"].get(kind, 0))
        keywords = settings.get(kind, {}) | ({"purge_step": complete + 1} if kind == "tensorboard" else {})
        arguments = (accelerator, kind, project, folder, keywords, _flat(cfg))
        sender = _Sender(kind, lambda a=arguments: _make(*a), closed)
        for line in lines:
            if line["step"] > complete:
                sender.add(*_numbers(line))
        _senders.append(sender)
    until = time.monotonic() + START
    for sender in _senders:
        if not sender.ready.wait(max(0.0, until - time.monotonic())):
            warn(f"report_to: {sender.kind} has not started in {START:g} s; training does not wait for it")
    sys.stdin = terminal


def _make(accelerator, kind: str, project: str, folder: Path, keywords: dict, config: dict):
    """Return a tracker that has started, as Accelerator.init_trackers makes it; one at a time, so that none needs another."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    make, where = LOGGER_TYPE_TO_CLASS[kind], []
    if make.requires_logging_directory:  # there, the project is the name of a folder
        project, where = re.sub(r"[^\w.-]+", "_", project), [str(folder / "trackers")]
    tracker = make(project, *where, **keywords)
    tracker.start()
    accelerator.trackers.append(tracker)  # for accelerator.get_tracker
    tracker.store_init_configuration(config)
    with suppress(Exception):
        if url := getattr(tracker.tracker, "url", None):
            print(f"{kind}: {url}", flush=True)
    return tracker


def _identity(folder: Path, config: str, step: int) -> dict:
    """Return the id of this run, and up to which step each tracker has every line; another run gets another id.

    A run that was killed before its first checkpoint and begins again, with the same configuration, is the same run."""
    digest, known = hashlib.sha256(config.encode()).hexdigest()[:16], {}
    with suppress(OSError, ValueError):
        known = json.loads((folder / FILE).read_text())
    if not (isinstance(known, dict) and known.get("run_id") and (step or known.get("config") == digest)):
        known = {"run_id": uuid.uuid4().hex}
    known = {"run_id": known["run_id"], "config": digest, "complete": known.get("complete", {}) if step else {}}
    with suppress(OSError):
        atomic_folder.rewrite(folder / FILE, json.dumps(known))
    return known


def _settings(cfg: RunConfig, folder: Path, run_id: str) -> dict[str, dict]:
    """Return what Accelerate passes on to each tracker; an environment variable of wandb's wins over a default of ours."""
    name = cfg.run_name or folder.name
    ours = {
        "name": name if cfg.run_name or not os.environ.get("WANDB_NAME") else None,
        "id": None if os.environ.get("WANDB_RUN_ID") else run_id,
        "resume": None if os.environ.get("WANDB_RESUME") else "allow",
        "dir": None if os.environ.get("WANDB_DIR") else str(folder),
    }
    # Its own lines and a copy of ours would be in the way; a run that is killed loses a second of its file, not 15.
    for variable, value in (("SILENT", "true"), ("CONSOLE", "off"), ("X_TRANSACTION_LOG_FLUSH_INTERVAL", "1")):
        os.environ.setdefault(f"WANDB_{variable}", value)
    return {"wandb": {key: value for key, value in ours.items() if value}, "mlflow": {"run_name": name}}


def add(line: dict) -> None:
    """Send a line of metrics.jsonl to every tracker; returns at once."""
    for sender in _senders:
        sender.add(*_numbers(line))


def _numbers(line: dict) -> tuple[dict, int]:
    names = [k for k, v in line.items() if isinstance(v, int | float) and k not in ("step", "kind")]
    return {f"{line['kind']}/{name}": line[name] for name in names}, line["step"]


def _flat(cfg: RunConfig) -> dict:
    values = redact_all(vars(cfg))
    return {k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in values.items()}


def close(seconds: float | None = None) -> bool:
    """Return whether every tracker is closed, after so many seconds (CLOSE) at the latest; called before a process ends.

    From any thread, and more than once: later calls wait no longer than the first one does."""
    until = time.monotonic() + (CLOSE if seconds is None else seconds)
    if _senders and not _closing:
        _closing.append(until)
    until = min([until, *_closing])
    for sender in _senders:
        sender.lines.put(None)
    closed = [sender.close(until) for sender in _senders]  # each of them, though one may not have closed
    return all(closed)
