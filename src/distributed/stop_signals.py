"""Reasons to stop or save: SIGTERM, Ctrl-C, the files `stop` and `save`, the time limit, a dead launcher.

Tests: tests/distributed/test_stop_signals.py. A thread listens, because the main thread may be inside a collective where
Python runs no signal handler; what it hears is agreed on by all ranks at the next boundary between two steps.
"""

import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from src.config.errors import Stopped
from src.config.schema import RunConfig
from src.runtime.exit_hooks import exiting, run_exit_hooks
from src.runtime.run_status import EXIT_STOPPED, failed_rank, lost, read_status, unlock_run_folder, write_status
from src.storage import held_folder

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
NAMES = {"SIGINT": "Ctrl-C"}  # what people call it
SAME = 1.0  # seconds in which further signals are taken for copies of the first: a launcher passes on what it got, too
AT_ONCE = 2.0  # seconds that trackers get where somebody wants the process to end at once
LOOK = 0.5  # seconds between two looks at files and clocks
PARENT = os.getppid()  # the launcher, if there is one: read before anything slow, in which it may end
STARTED = time.monotonic()  # when this process imported its first file of src/


class StopSignals:
    """Listens from its creation on; before `begin` a signal ends the process at once, since nothing could be lost."""

    def __init__(self, accelerator, cfg: RunConfig):
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.main, self.folder = accelerator.is_main_process, Path(cfg.output_dir)
        self.limit = None if cfg.time_limit is None else STARTED + 60 * cfg.time_limit
        self.reason: str | None = None  # why this rank wants to stop
        self.save = False
        self.begun = False
        self.step_seconds = self.save_seconds = 0.0  # the longest so far
        self.last = self.heard = None
        self.parent = PARENT if _launched() else None
        self.inbox, outbox = socket.socketpair()
        for end in (self.inbox, outbox):
            end.setblocking(False)
        for number in SIGNALS:
            signal.signal(number, _nothing)  # a handler of Python's, so that the number is written to the socket
        signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
        self.outbox = outbox
        threading.Thread(target=self._listen, name="watch", daemon=True).start()

    def begin(self) -> None:
        """From now on there is something to save, on every rank in the folder that is there now."""
        held_folder.hold(self.folder)
        self.begun, self.last = True, time.monotonic()

    def requests(self) -> list[float]:
        """Return [save, stop] of this rank, for the vector that all ranks add up; called between two steps."""
        save, self.save = self.save, False
        return [float(save), self.stopping()]

    def stopping(self) -> float:
        """Return 1 if this rank wants to stop; called between two steps and at the boundaries inside an evaluation."""
        now = time.monotonic()
        self.step_seconds, self.last = max(self.step_seconds, now - (self.last or now)), now
        return float(self.reason is not None)

    def why(self) -> str:
        return self.reason or "a signal to another rank"

    def _listen(self) -> None:
        while True:
            if select.select([self.inbox], [], [], LOOK)[0]:
                for number in self.inbox.recv(64):
                    if number in SIGNALS:  # every signal with a handler in Python comes by, such as those of a loader
                        self._signal(signal.Signals(number).name)
            with suppress(OSError):  # a file system that hiccups is looked at again
                self._look()

    def _signal(self, signal_name: str) -> None:
        now, name = time.monotonic(), NAMES.get(signal_name, signal_name)
        if not self.begun:
            told = read_status(self.folder)
            if self.main and told.get("status") == "running" and told.get("launcher") == os.getppid():
                with suppress(OSError):
                    reason = f"Stopped by {name} before the first step."
                    write_status(self.folder, "stopped", told["step"], EXIT_STOPPED, reason)
            _leave(EXIT_STOPPED, early(name))
        if self.heard is None:
            self.heard, self.reason = now, self.reason or name
            if exiting():  # the process has ended but for these
                return
            rank = f"rank {self.rank}: " if self.world > 1 else ""
            print(
                f"\n{rank}{name}: saving after this step, then stopping; a second {name} stops without saving",
                file=sys.stderr,
            )
        elif now - self.heard > SAME:
            _leave(128 + signal.Signals[signal_name], f"Stopped by a second {name} without saving (rank {self.rank}).")

    def _look(self) -> None:
        if reason := lost(self.folder):  # before anything there is read, which may be another run's
            self._abandon(reason)
        if self.parent is not None and os.getppid() != self.parent:
            self.reason = self.reason or "the end of the launcher"
        if self.begun and (other := failed_rank(self.folder, self.rank)):
            time.sleep(2)  # the launcher is to notice the rank that failed first, and quote it
            _leave(1, "", f"rank {other} failed", patience=None)
        if not self.main or not self.begun:
            return
        if self.limit and time.monotonic() + self._needed() > self.limit:
            self.reason = self.reason or "the time limit"
        for name in ("save", "stop"):
            file = self.folder / name
            if file.exists():
                file.unlink(missing_ok=True)
                if name == "save":
                    self.save = True
                else:
                    self.reason = self.reason or "the file stop"

    def _abandon(self, reason: str) -> None:
        """End this process, which has no run folder any more, without writing to the one that may be in its place."""
        first = os.environ.get("LOCAL_RANK", "0") == "0"
        if not first:
            time.sleep(1)  # the launcher is to notice the first rank of its node, and quote it
        text = f"failed: output_dir: {reason} while this run trained in it: ended without saving"
        _leave(1, text if first else "", text)

    def _needed(self) -> float:
        """Return the seconds that a step under way, and then a save, may still take."""
        return 1.5 * self.step_seconds + 2 * self.save_seconds + 2 * LOOK


def exit_on_signal() -> None:
    """Let a signal end this process at once with the code of a stop, until a Watch hears it: nothing can be lost yet."""
    for number in SIGNALS:
        signal.signal(number, lambda number, _: _leave(EXIT_STOPPED, early(signal.Signals(number).name)))


def early(name: str, training: bool = True) -> str:
    """Return what the first rank prints, and the others do not, when a signal ends all before training begins."""
    first = os.environ.get("RANK", "0") == "0"
    before = " before training began: there is nothing to save" if training else ""
    return f"Stopped by {NAMES.get(name, name)}{before}." if first else ""


def _launched() -> bool:
    return any(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"))


def check_launcher() -> None:
    """End where the launcher has ended while data was made ready: its store, and the other ranks, are gone."""
    if _launched() and os.getppid() != PARENT:
        raise Stopped("Stopped before training began: the launcher is gone.")


def _nothing(number, frame) -> None:
    pass


def ignore_signals(*_) -> None:
    """Make this process, a loader's, leave signals and the run folder to the rank that it reads for."""
    unlock_run_folder()
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _leave(code: int, text: str, logged: str = "", patience: float | None = AT_ONCE) -> None:
    import logging

    logging.getLogger("run").info("%s", text or logged)
    if text:
        print(f"\n{text}", file=sys.stderr, flush=True)
    run_exit_hooks(patience)
    os._exit(code)
