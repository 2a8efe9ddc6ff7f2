"""`accelerate launch` for make, with signals for the training processes and the exit code of the run.

    python -m src.distributed.run_launcher [RUN] -- --config_file X.yaml train.py --flag value …

RUN is the run folder if neither flags nor run file (YAML) set output_dir. Without RUN, this is an evaluation. The
launcher runs in its own session, so Ctrl-C reaches only this process, which forwards it to the training processes. The
launcher itself would end before they have saved, and print a traceback below their messages.
Tests: tests/distributed/test_run_launcher.py.
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
from src.distributed.stop_signals import stopped_early
from src.runtime import run_lock, run_status

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def find_run_folder(default: str, words: list[str]) -> tuple[Path, list[str]]:
    """Return (run folder, words): output_dir of the flags or run file, else `default`, which is added to the words."""
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    with suppress(UsageError):  # train.py reports the error
        flags, run_file, _ = parsing.split_flags(words[script + 1 :])
        values = read_yaml(run_file) if run_file else {}
        values |= {name: value[-1] for name, value in flags if value}
        if values.get("output_dir"):
            return Path(str(values["output_dir"])), words
    return Path(default), [*words, "--output_dir", default]


class Launcher:
    """`accelerate launch` in its own session, and the training processes that it starts."""

    def __init__(self, words: list[str], folder: Path | None = None):
        """Start the launcher. `folder` is the run folder, or None for an evaluation."""
        self.folder = folder
        self.signals: list[int] = []  # received so far
        self.start_time = time.time()
        self.has_started = False
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and background jobs ignore some signals
                signal.signal(number, self._receive)
        command = [sys.executable, "-m", "src.distributed.quiet_launcher", *words]
        self.process = subprocess.Popen(command, start_new_session=True)
        self.has_started = True
        for number in self.signals:  # received before the launcher existed
            self._pass_on(number)
        signal.signal(signal.SIGTSTP, self._pause)

    def wait(self) -> int:
        """Return the exit code of the launcher."""
        code = self.process.wait()
        return code if code >= 0 else 128 - code

    def status(self) -> dict:
        """Return status.json if a process of this launch has written it, else an empty dict."""
        status = run_status.read_status(self.folder) if self.folder else {}
        is_own = status.get("launcher") == self.process.pid and status.get("time", 0) >= self.start_time
        return status if is_own else {}

    def _training_processes(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            return psutil.Process(self.process.pid).children()
        return []

    def _receive(self, number: int, frame) -> None:
        self.signals.append(number)
        if self.has_started:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        """Forward a signal to the training processes, or kill the launcher if it has not started any."""
        self.process.send_signal(signal.SIGSTOP)  # so that it starts no process meanwhile
        processes = self._training_processes()
        for process in processes:
            with suppress(psutil.Error):  # a closed terminal (SIGHUP) saves and stops, like SIGTERM
                process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
        if processes:
            self.process.send_signal(signal.SIGCONT)
            return
        self.process.kill()
        if not self.status():  # otherwise the run itself has reported its end
            text = stopped_early(signal.Signals(number), training=self.folder is not None)
            print(f"\n{text}", file=sys.stderr, flush=True)

    def _pause(self, number: int, frame) -> None:
        """Suspend all processes on Ctrl-Z until this process continues (fg)."""
        processes = [self.process, *self._training_processes()]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for process in processes:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)


def exit_code(launcher_code: int, signals: list[int], training: bool, run_code: int | None) -> int:
    """Return the run's exit code: `run_code` from status.json, or without one a code from the launcher and signals."""
    if run_code is not None:
        return run_code
    if signals and launcher_code:
        stopped_before_saving = training and len(signals) == 1
        return run_status.EXIT_STOPPED if stopped_before_saving else 128 + signals[-1]
    return launcher_code


def main(argv: list[str]) -> int:
    """Launch, wait until the launcher and the run have ended, and return the exit code of the run."""
    separator = argv.index("--") if "--" in argv else None
    if separator not in (0, 1):
        usage = "error: usage: python -m src.distributed.run_launcher [RUN] -- ARGUMENTS OF ACCELERATE LAUNCH"
        print(usage, file=sys.stderr)
        return 2
    folder, words = None, argv[separator + 1 :]
    if separator == 1:
        folder, words = find_run_folder(argv[0], words)
    print(f"accelerate launch {shlex.join(words)}", flush=True)
    launcher = Launcher(words, folder)
    code = launcher.wait()
    if folder and launcher.status():
        run_lock.wait_for_end(folder)
    return exit_code(code, launcher.signals, folder is not None, launcher.status().get("exit_code"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
