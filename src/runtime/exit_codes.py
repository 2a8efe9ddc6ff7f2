"""The end of a process: exit code, final message, status.json, hooks that close trackers.

Exit codes: 0 complete · 1 failed · 2 the user can fix the error · 75 stopped and saved (EX_TEMPFAIL of sysexits.h):
run the same command to resume · 128 + N ended at once by signal N. Tests: tests/distributed/test_rank_failure.py.
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
from typing import Any, NoReturn

from src.config.errors import Failure, Stopped, UsageError
from src.config.redact import redact, redact_all
from src.runtime import console, run_status
from src.runtime.run_status import EXIT_STOPPED
from src.storage import peer_failures

EXIT_FAILED, EXIT_USAGE, EXIT_CTRL_C = 1, 2, 130
CONNECTION_WORDS = ("connection", "gloo", "nccl", "timed out", "peer", "socket")  # in errors of failed collectives
MEMORY_WORDS = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed")
ROOT_CAUSE_WAIT = 5.0  # seconds that a rank with a lost connection waits for the report of the rank that failed first
COMMON_ERROR_WAIT = 5.0  # seconds that a rank waits for rank 0 to report an error that all ranks may have
LOCAL_RANK_0_WAIT = 120.0  # seconds that a rank waits for the end of the one that prints the errors of all
LAUNCHER_WAIT = 2.0  # seconds until the launcher has noticed the rank that ended first, so that it quotes its error

log = logging.getLogger("run")
_run_folder: Path | None = None
_hooks: list[Callable[[float | None], bool]] = []
_exiting = False


def record_exit_in(folder: str | Path) -> None:
    """Choose the run folder where the outcome of this process is written to status.json."""
    global _run_folder
    _run_folder = Path(folder)


# ---- exit hooks ------------------------------------------------------------------------------------------------------


def on_exit(close: Callable[[float | None], bool]) -> None:
    """Register `close(seconds)`, which is called before this process exits.

    `close` must return within that time (None: its own limit), and return True if it has finished. Any thread may call
    it, more than once."""
    if close not in _hooks:
        _hooks.append(close)


def run_exit_hooks(seconds: float | None = None) -> bool:
    """Call all exit hooks. Return True if every hook has finished."""
    global _exiting
    _exiting = bool(_hooks)
    done = [close(seconds) for close in _hooks]  # a list: call every hook, even if one has not finished
    return all(done)


def is_exiting() -> bool:
    """Return True if this process has finished its work and only waits for its exit hooks."""
    return _exiting


def exit_process(code: int, seconds: float | None = None) -> NoReturn:
    """Run the exit hooks, then exit without destructors: those of a process group could wait for other ranks."""
    run_exit_hooks(seconds)
    sys.stdout.flush()
    os._exit(code)


# ---- main ------------------------------------------------------------------------------------------------------------


def run_main(work: Callable[[list[str]], None]) -> None:
    """Run `work(argv)`. On any error, print it and exit at once, so that no other rank waits for this one."""
    argv = _prepare()
    try:
        work(argv)
        if not run_exit_hooks():  # what blocks this hook could also block the normal exit of Python
            exit_process(0)
    except SystemExit as error:
        if _run_folder is None:  # --help
            raise
        _fail(error)  # a library called sys.exit during the run
    except UsageError as error:
        _end(EXIT_USAGE, str(error), "error: ", error)
    except Stopped as error:
        _end(EXIT_STOPPED, str(error))
    except Failure as error:
        _end(EXIT_FAILED, f"failed: {error}", "", error)
    except KeyboardInterrupt:
        _end(EXIT_CTRL_C, "Stopped by Ctrl-C.")
    except Exception as error:
        _fail(error)


def _prepare() -> list[str]:
    """Set up console and redaction; return the arguments. Redact `sys.argv`, because trackers upload it."""
    console.prepare()
    streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
    for stream in streams:
        stream.reconfigure(errors="replace")  # an ASCII terminal shows a question mark instead of raising
        _redact_stream(stream)
    argv = sys.argv[1:]
    sys.argv[1:] = redact_all(argv)
    return argv


def _redact_stream(stream: Any) -> None:
    """Redact everything written to `stream`, also by libraries. Ignore OSError: a closed pipe or a full disk must not
    end a run."""

    def wrap(original):
        def call(*args):
            with suppress(OSError):
                return original(*map(redact, args))
            return len(args[0]) if args else None

        return call

    stream.write = wrap(stream.write)
    stream.flush = wrap(stream.flush)


def _end(code: int, message: str, prefix: str = "", error: Exception | None = None) -> NoReturn:
    """End this rank with an outcome that all ranks share, or with an error that it alone has. Only one rank prints."""
    _log(message)
    if _prints(code, message, error):
        _record(code, message)
        _print_error(prefix + message)
    else:  # let the rank that prints end first, because the launcher quotes the first, and ends the others
        time.sleep(1)
        if _run_folder is None and peer_failures.current is None:  # it may still import
            peer_failures.wait_for_local_rank_0(LOCAL_RANK_0_WAIT)
    exit_process(code)


def _prints(code: int, message: str, error: Exception | None) -> bool:
    """Return True if this rank prints the outcome: rank 0 a stop, because only it knows the step; an error one rank.

    The attributes `already_reported` and `reported_elsewhere` of an error, if set, have decided it."""
    if hasattr(error, "reported_elsewhere"):
        return not error.reported_elsewhere
    if error is None or (_run_folder is None and peer_failures.current is None):
        return os.environ.get("RANK" if code == EXIT_STOPPED else "LOCAL_RANK", "0") == "0"
    if _rank() > 0 and code_of_failed_rank(COMMON_ERROR_WAIT):  # rank 0 prints an error of all ranks
        return False
    return _report(error, message, code)


def _fail(error: BaseException) -> NoReturn:
    """End this rank because of its own error. Print the error unless another rank failed before."""
    text = console.unwritten() + _describe(error, _rank())
    _log(text)
    connection_lost = isinstance(error, RuntimeError) and _has_word(error, CONNECTION_WORDS)
    is_first = getattr(error, "already_reported", False)  # during data preparation
    code = None if is_first else code_of_failed_rank(ROOT_CAUSE_WAIT if connection_lost else 0.0)
    if code or not _report(error, text, EXIT_FAILED):
        time.sleep(LAUNCHER_WAIT)
        exit_process(code or EXIT_FAILED)
    if connection_lost and _run_folder is None:
        text = f"the connection to another rank was lost before the first step; see the error of that rank ({error})"
    elif connection_lost:
        text += f"\nrank {_rank()} lost the connection to another rank, which ended without a report (was it killed?)"
    _record(EXIT_FAILED, text)
    _print_error(f"rank {_rank()} failed:\n{text}")
    exit_process(EXIT_FAILED)


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def _describe(error: BaseException, rank: int) -> str:
    """Return the traceback, or the message of a UsageError; if memory ran out, also what to do."""
    text = str(error) if isinstance(error, UsageError) else traceback.format_exc()
    if is_out_of_memory(error):
        both = "a smaller --per_device_batch_size (in an evaluation, --per_device_eval_batch_size)"
        smaller = getattr(error, "smaller_batch", both)  # set in a forward or backward pass of training
        text += (
            f"\nrank {rank} ran out of memory: give {smaller}; the same command then resumes from the last checkpoint"
        )
    return text


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that memory ran out; torch has a class of its own for only some of these errors."""
    return _has_word(error, MEMORY_WORDS)


def _has_word(error: BaseException, words: tuple[str, ...]) -> bool:
    message = str(error).lower()
    return any(word in message for word in words)


def _report(error: BaseException, text: str, code: int) -> bool:
    """Report this rank's error to the other ranks; return True if this is the first report of the launch."""
    if peer_failures.current:
        peer_failures.current.report_failure(error)
    if _run_folder is not None:
        return run_status.report_failure(_run_folder, _rank(), text, code)
    return getattr(error, "already_reported", True)


def code_of_failed_rank(seconds: float = 0.0) -> int | None:
    """Return the exit code of another rank that has reported a failure; wait up to `seconds` for its report."""
    deadline = time.monotonic() + seconds
    while True:
        if _run_folder is not None and run_status.failed_rank(_run_folder, _rank()):
            return run_status.failed_code(_run_folder)
        if peer_failures.current and (error := peer_failures.current.other_error()):
            return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.1)


def _record(code: int, message: str) -> None:
    """Write the outcome to status.json, and to torchrun's error file, from which it quotes the first error."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):  # the launcher's folder in /tmp is full or gone: the code and the message still count
            Path(file).write_text(json.dumps({"message": redact(message), "timestamp": int(time.time())}))
    if _run_folder is None:
        return
    outcome = "stopped" if code == EXIT_STOPPED else "failed"
    last_line = message.strip().splitlines()[-1]
    with suppress(OSError):
        step = run_status.read_status(_run_folder).get("step")
        run_status.write_status(_run_folder, outcome, step, code, last_line)


def _log(message: str) -> None:
    """Write to the log file of this rank, if it exists already."""
    if log.hasHandlers():
        log.error("%s", message)


def _print_error(message: str) -> None:
    sys.stdout.flush()
    print(f"\n{message}", file=sys.stderr, flush=True)
