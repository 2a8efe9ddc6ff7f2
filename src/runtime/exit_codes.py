"""Run a script's `main` and end its process: exit codes, error messages, status.json.

Tests: tests/distributed/test_rank_failure.py.
"""

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from src.config.errors import Failure, Stopped, UsageError, warn
from src.config.redact import learn, learn_environment, redact, redact_all
from src.runtime import console, run_status
from src.runtime.exit_hooks import run_exit_hooks

log = logging.getLogger("run")
CONNECTION = ("connection", "gloo", "nccl", "timed out", "peer", "socket")  # in what a broken collective says
_folder: list[Path] = []  # of the run, from the moment on when it is this process's to write to


def record_exit_in(folder: str | Path) -> None:
    """From now on, how this process ends is noted in the run folder."""
    _folder[:] = [Path(folder)]


def run_main(work: Callable[[list[str]], None]) -> None:
    """Run `work(argv)`; on a fault print what matters last and end this process at once, so that no other waits for it."""
    console.prepare()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal that knows only ASCII gets a question mark, not a traceback
        _forgive(stream)
    learn(sys.argv[1:])
    learn_environment()
    argv, sys.argv[1:] = sys.argv[1:], redact_all(sys.argv[1:])  # trackers upload it
    if argv != sys.argv[1:]:
        warn(
            "there are credentials on the command line, which `ps` shows to all users of this machine, and which accelerate launch "
            "prints if this process fails (unless it is given --quiet): put them into the run file"
        )
    try:
        work(argv)
        if not run_exit_hooks():  # what hangs in there could hang the interpreter's own end as well
            _exit(0)
    except SystemExit as error:
        if not _folder:  # --help
            raise
        _fail(error)  # somebody's sys.exit in the middle of a run
    except UsageError as error:
        if getattr(error, "alone", False):  # met by this rank in the middle of a run
            _fail(error)
        _end(2, str(error), "error: ", error)
    except Stopped as error:
        _end(run_status.EXIT_STOPPED, str(error))
    except Failure as error:
        _end(1, f"failed: {error}", "", error)
    except KeyboardInterrupt:
        _end(130, "Stopped by Ctrl-C.")
    except Exception as error:
        _fail(error)


def _forgive(stream) -> None:
    """Redact what is printed, by libraries too. What cannot be printed is lost: a pipe without a reader, or a log on a
    full disk, is no reason to end a run."""

    def forgiving(original):
        def call(*args):
            with suppress(OSError):
                return original(*map(redact, args))
            return len(args[0]) if args else None

        return call

    stream.write, stream.flush = forgiving(stream.write), forgiving(stream.flush)


def _end(code: int, message: str, prefix: str = "", error: Exception | None = None) -> None:
    """End every rank alike, with one message: the fault, or the stop, is the same on all of them.

    What one rank alone has met (`told`: it left word of it) it says itself, and those that heard of it are silent."""
    _keep(message)
    # Of a stop only the main process knows the step; a rank of another node may end after it.
    rank = os.environ.get("RANK" if code == run_status.EXIT_STOPPED else "LOCAL_RANK", "0")
    first = getattr(error, "already_reported", rank == "0") and not getattr(error, "reported_elsewhere", False)
    if first:
        _note(code, message)
        _say(prefix + message)
    else:
        time.sleep(1)  # let rank 0 be the first to end, and the launcher quote it
    _exit(code)


def _fail(error: BaseException) -> None:
    """End this rank because of what went wrong on it; or without a word, because another one had failed before."""
    rank, text = int(os.environ.get("RANK", 0)), traceback.format_exc()
    text = str(error) if isinstance(error, UsageError) else text
    if any(sign in str(error).lower() for sign in ("out of memory", "can't allocate memory")):
        text += (
            f"\nrank {rank} ran out of memory: give a smaller --per_device_batch_size (the global batch stays, accumulation "
            "grows); the same command then goes on from the last checkpoint"
        )
    text = console.unwritten() + text
    _keep(text)
    lost = isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in CONNECTION)
    if _folder:
        until = time.monotonic() + (5 if lost else 0)  # where a rank that failed left its word, this is no news
        while not (first := run_status.failed_rank(_folder[0], rank)) and time.monotonic() < until:
            time.sleep(0.1)
        if first or not run_status.report_failure(_folder[0], rank, text):
            time.sleep(2)  # the launcher is to notice the rank that failed first, and quote it
            _exit(1)
        if lost:
            text += f"\nrank {rank} lost the connection to another rank, which ended without a word (killed?)"
    elif lost:  # before there is a folder where ranks leave their word
        time.sleep(2)
        text = f"the connection to another rank was lost before the first step; that one says why ({error})"
    _note(1, text)
    _say(f"rank {rank} failed:\n{text}")
    _exit(1)


def _exit(code: int) -> None:
    """Close the trackers and end at once: destructors of a group in which others still wait could wait themselves."""
    run_exit_hooks()
    sys.stdout.flush()
    os._exit(code)


def _note(code: int, message: str) -> None:
    """Tell the launcher, which prints it last whatever other ranks print, and whoever reads status.json."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": redact(message), "timestamp": int(time.time())}))
    if _folder:
        with suppress(OSError):
            kind = "stopped" if code == run_status.EXIT_STOPPED else "failed"
            last = message.strip().splitlines()[-1]
            run_status.write_status(_folder[0], kind, run_status.read_status(_folder[0]).get("step"), code, last)


def _keep(message: str) -> None:
    """Write to this rank's log file, if it has one by now."""
    if log.hasHandlers():
        log.error("%s", message)


def _say(message: str) -> None:
    sys.stdout.flush()
    print(f"\n{message}", file=sys.stderr, flush=True)
