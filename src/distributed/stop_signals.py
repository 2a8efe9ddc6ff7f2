"""Reasons to stop or save: SIGTERM, SIGUSR1, Ctrl-C, the files `stop` and `save`, the time limit, a dead launcher.

A thread listens, since Python runs no signal handler while the main thread waits in a collective. Between two steps all
ranks add up what they heard and decide together. Tests: tests/distributed/test_stop_signals.py.
"""

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from src.config.errors import Stopped
from src.config.schema import RunConfig
from src.runtime import run_lock, run_status
from src.runtime.exit_codes import exit_process, is_exiting
from src.runtime.run_status import EXIT_STOPPED
from src.storage import lost_run_folder

if TYPE_CHECKING:
    from accelerate import Accelerator

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
DISPLAY_NAMES = {"SIGINT": "Ctrl-C"}
COPY_SECONDS = (
    1.0  # signals within this time are copies of the first: a launcher passes on what the whole group received
)
TRACKER_SECONDS = 2.0  # time for trackers to close when the process must end at once
POLL_SECONDS = 0.5  # between two looks at files and clocks
LAUNCHER_PID = os.getppid()  # read before anything slow, during which the launcher may end
PROCESS_START = time.monotonic()

log = logging.getLogger("run")


class StopSignals:
    """Listens from its creation on. Before `begin` a signal ends the process at once: there is nothing to save yet."""

    def __init__(self, accelerator: "Accelerator", cfg: RunConfig):
        self.rank, self.is_main = accelerator.process_index, accelerator.is_main_process
        self.folder = Path(cfg.output_dir)
        self.deadline = None if cfg.time_limit is None else PROCESS_START + 60 * cfg.time_limit
        self.has_launcher = _has_launcher()
        self.reason: str | None = None  # why this rank wants to stop
        self.save_requested = False
        self.is_training = False
        self.step_seconds = 0.0  # of the slowest step
        self.save_seconds = 0.0  # of the slowest save
        self.last_boundary: float | None = None
        self.first_signal: float | None = None
        self._receive_signals()
        threading.Thread(target=self._listen, name="stop signals", daemon=True).start()

    def begin(self) -> None:
        """Note that training begins, in the run folder that is there now: from now on a stop saves first."""
        lost_run_folder.hold(self.folder)
        self.is_training = True
        self.last_boundary = time.monotonic()

    def requests(self) -> list[float]:
        """Return [save, stop] of this rank, to be summed over all ranks; call it between two steps."""
        save, self.save_requested = self.save_requested, False
        return [float(save), self.stopping()]

    def stopping(self) -> float:
        """Return 1 if this rank wants to stop; call it between two steps and between the batches of an evaluation."""
        now = time.monotonic()
        self.step_seconds = max(self.step_seconds, now - (self.last_boundary or now))
        self.last_boundary = now
        return float(self.reason is not None)

    def why(self) -> str:
        return self.reason or "a signal to another rank"

    # ---- in the thread -----------------------------------------------------------------------------------------------

    def _receive_signals(self) -> None:
        """Let Python write the number of every signal to a socket, which the thread reads."""
        self.inbox, self.outbox = socket.socketpair()
        for end in (self.inbox, self.outbox):
            end.setblocking(False)
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: None)  # only signals with a handler are written
        signal.set_wakeup_fd(self.outbox.fileno(), warn_on_full_buffer=False)

    def _listen(self) -> None:
        while True:
            if select.select([self.inbox], [], [], POLL_SECONDS)[0]:
                for number in self.inbox.recv(64):
                    if number in SIGNALS:  # others have handlers too, such as SIGCHLD of data loaders
                        self._handle(signal.Signals(number))
            with suppress(OSError):  # a network disk may fail for a moment: look again
                self._poll()

    def _handle(self, number: signal.Signals) -> None:
        now, name = time.monotonic(), _display_name(number)
        if not self.is_training:
            self._record_early_stop(name)
            _exit(EXIT_STOPPED, stopped_early(number))
        if self.first_signal is None:
            self.first_signal = now
            self.reason = self.reason or name
            if not is_exiting():
                text = f"{name}: saving after this step, then stopping; a second {name} stops without saving"
                log.info("%s", text)
                if self.is_main:  # Ctrl-C reaches all ranks
                    print(f"\n{text}", file=sys.stderr, flush=True)
        elif now - self.first_signal > COPY_SECONDS:
            text = f"Stopped by a second {name} without saving"
            is_first = run_status.report_failure(self.folder, self.rank, text)
            _exit(128 + number, f"{text} (rank {self.rank})." if is_first else "")

    def _record_early_stop(self, name: str) -> None:
        """Write to status.json that this launch was stopped, if it has written there already."""
        status = run_status.read_status(self.folder)
        if self.is_main and status.get("status") == "running" and status.get("launcher") == os.getppid():
            with suppress(OSError):
                reason = f"Stopped by {name} before the first step."
                run_status.write_status(self.folder, "stopped", status["step"], EXIT_STOPPED, reason)

    def _poll(self) -> None:
        if reason := run_lock.lost(self.folder):  # checked first: the files below could be those of another run
            self._exit_without_folder(reason)
        if self.has_launcher and os.getppid() != LAUNCHER_PID:
            self.reason = self.reason or "the end of the launcher"
        if not self.is_training:
            return
        if other := run_status.failed_rank(self.folder, self.rank):
            log.info("rank %s failed", other)
            time.sleep(2)  # the launcher notices the rank that failed first, and quotes it
            exit_process(1)
        if self.is_main:
            self._poll_requests()

    def _poll_requests(self) -> None:
        """Look at the clock and for the files `save` and `stop`; remove the files."""
        if self.deadline and time.monotonic() + self._seconds_to_stop() > self.deadline:
            self.reason = self.reason or "the time limit"
        if (self.folder / "save").exists():
            (self.folder / "save").unlink(missing_ok=True)
            self.save_requested = True
        if (self.folder / "stop").exists():
            (self.folder / "stop").unlink(missing_ok=True)
            self.reason = self.reason or "the file stop"

    def _seconds_to_stop(self) -> float:
        """Return the seconds that the current step and a save may still take."""
        return 1.5 * self.step_seconds + 2 * self.save_seconds + 2 * POLL_SECONDS

    def _exit_without_folder(self, reason: str) -> NoReturn:
        """End this process without writing: another run may have its folder in the same place."""
        text = f"failed: output_dir: {reason} while this run trained in it: ended without saving"
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        if not is_first:
            log.info("%s", text)
            time.sleep(1)  # the launcher notices the first rank of its node, and quotes it
        _exit(1, text if is_first else "")


def exit_on_signal() -> None:
    """Let a signal end this process at once with exit code 75, until StopSignals takes over: there is nothing to save."""
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: _exit(EXIT_STOPPED, stopped_early(signal.Signals(number))))


def stopped_early(number: signal.Signals, training: bool = True) -> str:
    """Return what rank 0 prints when a signal ends the process before training; nothing on other ranks."""
    if os.environ.get("RANK", "0") != "0":
        return ""
    detail = " before training began: there is nothing to save" if training else ""
    return f"Stopped by {_display_name(number)}{detail}."


def check_launcher() -> None:
    """Raise Stopped if the launcher ended during data preparation: its store and the other ranks are gone."""
    if _has_launcher() and os.getppid() != LAUNCHER_PID:
        raise Stopped("Stopped before training began: the launcher is gone.")


def ignore_signals() -> None:
    """Leave signals and the lock of the run folder to the rank that this process reads data for."""
    run_lock.unlock_run_folder()
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _has_launcher() -> bool:
    return any(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"))


def _display_name(number: signal.Signals) -> str:
    return DISPLAY_NAMES.get(number.name, number.name)


def _exit(code: int, text: str) -> NoReturn:
    """Log and print `text`, if there is any, and end this process at once."""
    if text:
        log.info("%s", text)
        print(f"\n{text}", file=sys.stderr, flush=True)
    exit_process(code, TRACKER_SECONDS)
