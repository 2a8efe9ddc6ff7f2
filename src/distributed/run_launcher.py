"""Start the launcher for make: pass signals to the training processes, return the run's exit code.

    python -m src.distributed.run_launcher [RUN] -- --config_file X.yaml train.py --flag value …

RUN is the folder of the run where neither flags nor run file name one. The launcher gets a session of its own: Ctrl-C
reaches the training processes, through this one, and not the launcher, which would end before they have saved, with a
traceback below what they say. Tests: tests/distributed/test_run_launcher.py.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from src.config import parsing
from src.config.errors import UsageError
from src.config.yaml_files import read_yaml
from src.distributed.stop_signals import early
from src.runtime import run_status as status

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def with_folder(default: str, words: list[str]) -> tuple[Path, list[str]]:
    """Return (folder of the run, words): as flags or run file name it, else `default`, which is then added to the words."""
    argv = words[next(i for i, word in enumerate(words) if word.endswith(".py")) + 1 :]
    with suppress(UsageError):  # train.py says it
        flags, path = parsing.flags_of(argv, [])
        values = (read_yaml(path) if path else {}) | {name: value[-1] for name, value in flags if value}
        if values.get("output_dir"):
            return Path(str(values["output_dir"])), words
    return Path(default), [*words, "--output_dir", default]


class Launched:
    """A launcher in a session of its own, and the training processes that it starts."""

    def __init__(self, words: list[str], folder: Path | None = None):
        """`folder` is that of the run; None: an evaluation."""
        self.child, self.signals, self.folder = None, [], folder  # signals: passed on so far
        self.began = time.time()
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a job in the background
                signal.signal(number, self._pass_on)
        self.child = subprocess.Popen(
            [sys.executable, "-m", "src.distributed.quiet_launcher", *words], start_new_session=True
        )
        for number in self.signals:
            self._send(number)
        signal.signal(signal.SIGTSTP, self._pause)

    def wait(self) -> int:
        """Return the exit code of the launcher."""
        code = self.child.wait()
        return code if code >= 0 else 128 - code

    def status(self) -> dict:
        """Return what status.json says, if a process of this launch has written it."""
        known = status.read_status(self.folder) if self.folder else {}
        own = known.get("launcher") == self.child.pid and known.get("time", 0) >= self.began
        return known if own else {}

    def _processes(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            return psutil.Process(self.child.pid).children()
        return []

    def _pass_on(self, number: int, _) -> None:
        self.signals.append(number)
        if self.child:
            self._send(number)

    def _send(self, number: int) -> None:
        self.child.send_signal(signal.SIGSTOP)  # so that it starts no process now
        processes = self._processes()
        for process in processes:
            with suppress(psutil.Error):  # a terminal that is gone does not mean to lose what was not saved
                process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
        if processes:
            self.child.send_signal(signal.SIGCONT)
        else:
            self.child.kill()
            if not self.status():  # else the run has ended and said how; only its launcher had not yet
                print(f"\n{early(signal.Signals(number).name, self.folder is not None)}", file=sys.stderr, flush=True)

    def _pause(self, *_) -> None:
        """Ctrl-Z: stop all until this process is continued."""
        everybody = [self.child, *self._processes()]
        for process in everybody:
            process.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for process in everybody:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)


def exit_code(code: int, signals: list[int], training: bool, own: int | None) -> int:
    """Return the exit code of the run, `own` where it has left one: a launcher knows only 0 and 1."""
    if own is not None or not code:
        return own or 0
    if signals:
        return status.EXIT_STOPPED if training and len(signals) == 1 else 128 + signals[-1]
    return code


def main(argv: list[str]) -> int:
    """Launch, wait for launcher and run to end, and return the exit code."""
    at = argv.index("--") if "--" in argv else 2
    if at > 1:
        print(
            "error: give python -m src.distributed.run_launcher [RUN] -- ARGUMENTS OF ACCELERATE LAUNCH",
            file=sys.stderr,
        )
        return 2
    folder, words = None, argv[at + 1 :]
    if at:
        folder, words = with_folder(argv[0], words)
    print(f"accelerate launch {shlex.join(words)}", flush=True)
    launched = Launched(words, folder)
    code = launched.wait()
    if launched.status():
        status.wait_for_end(folder)
    return exit_code(code, launched.signals, folder is not None, launched.status().get("exit_code"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
