"""Stop and save requests: signals, Ctrl-C, the files `stop` and `save`, the time limit, a dead launcher.

A background thread receives signals, because Python runs no signal handler while the main thread waits in a collective.
Everything else is looked at between two steps, and between blocks of an evaluation. Then all ranks sum their requests and
decide together. Tests: tests/engine/distributed/test_stop_signals.py.
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
from typing import NoReturn

from engine import startup
from engine.config.errors import UsageError
from engine.config.run_config import RunConfig
from engine.distributed import host_group
from engine.process.exit_codes import (
    EXIT_FAILED,
    another_rank_failed,
    exit_process,
    is_exiting,
    print_once,
    training_begins,
)
from engine.process.run_status import EXIT_STOPPED
from engine.process.worker_processes import SIGNALS

DISPLAY_NAMES = {"SIGINT": "Ctrl-C"}
# A signal within this time is a duplicate of the first: a launcher forwards what all its processes have received.
COPY_SECONDS = 1.0
TRACKER_SECONDS = 2.0  # time for trackers to close when the process must end at once
LOOK_SECONDS = 0.5  # between two looks at the run folder, which may be on a network disk
WAKE_SECONDS = 60.0  # between two looks of the thread, for a main thread that waits without an end
HANG_SHARE = 0.5  # of ddp_timeout, after which a collective fails
PROCESS_START = startup.STARTED

log = logging.getLogger("run")


class StopSignals:
    """The requests of this rank, from `listen` on."""

    def __init__(self, rank: int, cfg: RunConfig):
        self.rank, self.is_main = rank, rank == 0
        self.folder = Path(cfg.output_dir)
        self.deadline = None if cfg.time_limit is None else PROCESS_START + 60 * cfg.time_limit
        self.hang_seconds, self.last_hang = HANG_SHARE * cfg.ddp_timeout, 0.0
        self.reason: str | None = None  # why this rank wants to stop
        self.save_requested = False  # until the next save
        self.stop_step: int | None = None  # the file `stop` may hold a step
        self.step_seconds = 0.0  # of the slowest step, or block of an evaluation
        self.save_seconds = 0.0  # of the slowest save
        self.last_boundary: float | None = None
        self.last_look = -LOOK_SECONDS  # at the run folder
        self.first_signal: float | None = None

    def listen(self) -> None:
        """From now on, a signal saves and stops instead of ending the process."""
        global _training
        _training = self

    def votes(self) -> dict[str, float]:
        """Return this rank's requests by name, each 0 or 1, to be summed over ranks between two steps."""
        return {"save": float(self.save_requested), "stop": self.stopping()}

    def stopping(self) -> float:
        """Return 1 if this rank wants to stop, else 0."""
        return float(self.reason is not None)

    def any_rank_stops(self, hosts: host_group.HostGroup) -> bool:
        """Return whether a request to stop has reached any rank (a collective)."""
        self.look()
        return bool(hosts.sum([self.stopping()])[0])

    # ---- between two steps, or two blocks of an evaluation -----------------------------------------------------------

    def look(self, step: int | None = None) -> None:
        """Look at the launcher, the clock and the run folder. `step`: those that are done; None within an evaluation."""
        training_begins()
        now = time.monotonic()
        if self.last_boundary is not None:
            self.step_seconds = max(self.step_seconds, now - self.last_boundary)
        self.last_boundary = now
        if _launcher_has_ended():
            self.reason = self.reason or "the end of the launcher"
        if self.is_main and self.deadline and now + self._seconds_to_stop() > self.deadline:
            self.reason = self.reason or "the time limit"
        if now - self.last_look > LOOK_SECONDS:
            self.last_look = now
            with suppress(OSError):  # a network disk may fail for a moment: the next look tries again
                self._look_at_folder()
        if self.stop_step is not None and step is not None and step >= self.stop_step:
            self.reason = self.reason or "the file stop"

    def _look_at_folder(self) -> None:
        """Check the files `save` and `stop` of the run folder; delete them."""
        if not self.is_main:
            return
        save, stop = self.folder / "save", self.folder / "stop"
        if save.exists():
            self.save_requested = True  # before the file is gone: a program may wait for that
            save.unlink(missing_ok=True)
        if stop.exists():
            words = stop.read_bytes().split()  # any bytes: text that cannot be read must not end the run of one rank
            if words and words[0].isdigit():
                self.stop_step = int(words[0])
            else:
                self.reason = self.reason or "the file stop"
            stop.unlink(missing_ok=True)

    def _seconds_to_stop(self) -> float:
        """Return an upper estimate of the seconds that another step and a save take."""
        return 1.5 * self.step_seconds + 2 * self.save_seconds + 1.0

    # ---- in the background thread ------------------------------------------------------------------------------------

    def handle(self, number: signal.Signals) -> None:
        """Ask for a stop; at a second signal, end this process at once."""
        now, name = time.monotonic(), _display_name(number)
        if self.first_signal is None:
            self.first_signal = now
            if another_rank_failed():  # in a thread, so that this one notices a second signal
                threading.Thread(target=exit_process, args=(EXIT_FAILED,), name="end", daemon=True).start()
                return
            self.reason = self.reason or name
            if not is_exiting():
                text = f"{name}: saving after this step, then stopping; a second {name} stops without saving"
                log.info("%s", text)
                if self.is_main:  # print once, since Ctrl-C reaches all ranks
                    print(f"\n{text}", file=sys.stderr, flush=True)
        elif now - self.first_signal > COPY_SECONDS:
            _exit(128 + number, f"Stopped by a second {name} without saving.")

    def report_hang(self) -> None:
        """Report once if this rank has made no progress for a long time."""
        idle = time.monotonic() - host_group.last_sum  # a step has at least one sum over all ranks
        if idle > self.hang_seconds and self.last_hang != host_group.last_sum:
            self.last_hang = host_group.last_sum
            host_group.report_hang(self.rank, idle, self.folder / "logs" / f"stacks_rank_{self.rank}.txt")


_training: StopSignals | None = None  # what a signal asks to stop; None: nothing to save yet


def exit_on_signal() -> None:
    """Make a signal, or the end of the launcher, end this process at once with exit code 75, until StopSignals listens:
    there is nothing to save.

    A thread does it, because no handler of Python runs while this process waits for other ranks."""
    global _training
    _training = None
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "train.main was called in a thread, where Python receives no signals: start train.py as a process of its own, as "
            "cluster/ray_train.py does"
        )
    inbox, outbox = socket.socketpair()  # Python writes the number of every signal to the second while it is open
    for end in (inbox, outbox):
        end.setblocking(False)
    signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: None)  # Python writes only signals that have a handler
    threading.Thread(target=_listen, args=(inbox, outbox), name="stop signals", daemon=True).start()


def _listen(inbox: socket.socket, outbox: socket.socket) -> NoReturn:
    while True:
        is_ready = select.select([inbox], [], [], WAKE_SECONDS)[0]
        for number in inbox.recv(64) if is_ready else b"":
            if number in SIGNALS:  # others have handlers, too, such as SIGCHLD of dataloader workers
                (_training.handle if _training else _exit_early)(signal.Signals(number))
        if _training:
            _training.report_hang()
        elif _launcher_has_ended():  # and the store by which its ranks would meet
            _exit(EXIT_STOPPED, "Stopped before training began: the launcher has ended.")


def _exit_early(number: signal.Signals) -> NoReturn:
    """End this process, which does not train yet; silently if a launcher ends it because another rank has failed."""
    failed = another_rank_failed()
    text = f"Stopped by {_display_name(number)} before training began: there is nothing to save."
    is_silent = failed or os.environ.get("RANK", "0") != "0"
    _exit(EXIT_FAILED if failed else EXIT_STOPPED, "" if is_silent else text)


def _launcher_has_ended() -> bool:
    return startup.LAUNCHER_PID not in (0, os.getppid())


def _display_name(number: signal.Signals) -> str:
    return DISPLAY_NAMES.get(number.name, number.name)


def _exit(code: int, text: str) -> NoReturn:
    """Log and print `text` unless it is empty, and end this process at once."""
    if text:
        log.info("%s", text)
        print_once(text)
    exit_process(code, TRACKER_SECONDS)
