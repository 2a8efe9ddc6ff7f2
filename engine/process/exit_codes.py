"""The end of a process: exit code, error message, status.json, hooks that close trackers.

Exit codes: 0 complete · 1 failed · 2 the user can fix the error · 75 stopped and saved (EX_TEMPFAIL of sysexits.h):
run the same command to resume · 128 + N ended at once by signal N. Each rank that fails prints its error; the launcher
ends the other ranks and names the first failure. Tests: tests/engine/distributed/test_rank_failure.py.
"""

import hashlib
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

from engine.config.errors import Failure, Stopped, UsageError
from engine.process import console, library_errors, run_status
from engine.process.run_status import EXIT_STOPPED
from engine.storage import jsonl

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CTRL_C = 130
STOP_IS_SUCCESS = "STOP_IS_SUCCESS"  # set by `make train`: make and launchers take any code but 0 for a failure
CONNECTION_WORDS = ("connection", "gloo", "nccl", "timed out", "peer", "socket")  # in errors of failed collectives
MEMORY_WORDS = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed")

log = logging.getLogger("run")
_run_folder: Path | None = None
_hooks: list[Callable[[float | None], bool]] = []
_exiting = False
_training = False


def training_begins() -> None:
    """From now on an error of a library ends this rank with its traceback: what it was doing is not known any more."""
    global _training
    _training = True


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
    if code == EXIT_STOPPED and STOP_IS_SUCCESS in os.environ:
        code = 0
    os._exit(code)


# ---- main ------------------------------------------------------------------------------------------------------------


def run_main(work: Callable[[list[str]], None]) -> None:
    """Run `work(argv)`. On any error, print it and exit at once, so that no other rank waits for this one."""
    _prepare_output()
    try:
        work(sys.argv[1:])
        if not run_exit_hooks():  # what blocks this hook could also block the normal exit of Python
            exit_process(0)
    except BaseException as error:
        if isinstance(error, SystemExit) and _run_folder is None:  # --help; later, a library called sys.exit
            raise
        end_process(error)


def _prepare_output() -> None:
    """Set up the console, so that nothing that is printed can end a run."""
    console.prepare()
    streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
    for stream in streams:
        stream.reconfigure(errors="replace")  # an ASCII terminal shows a question mark instead of raising
        stream.write = _without_disk_errors(stream.write)
        stream.flush = _without_disk_errors(stream.flush)


def _without_disk_errors(method: Callable) -> Callable:
    """Return a method of a stream that ignores OSError: a closed pipe or a full disk must not end a run."""

    def call(*texts):
        with suppress(OSError):
            return method(*texts)
        return len(texts[0]) if texts else None

    return call


def end_process(error: BaseException) -> NoReturn:
    """Log and print why this rank ends, write it to status.json, and exit."""
    rank = int(os.environ.get("RANK", 0))
    code, text = _outcome(error)
    if log.hasHandlers():
        log.error("%s", text)
    if code in (EXIT_STOPPED, EXIT_CTRL_C):
        if rank != 0:  # only rank 0 knows the step
            time.sleep(1)  # so that rank 0 ends first: a rank that ends makes the launcher send SIGTERM to the others
            exit_process(code)
    else:
        if isinstance(error, RuntimeError) and _has_word(error, CONNECTION_WORDS):
            time.sleep(1)  # so that the launcher sees the rank that failed first, names it, and ends this one
        _tell_launcher(text)
    _write_outcome(code, text)
    print_once(text)
    exit_process(code)


def _outcome(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the reason."""
    if isinstance(error, Stopped):
        return EXIT_STOPPED, str(error)
    if isinstance(error, KeyboardInterrupt):
        return EXIT_CTRL_C, "Stopped by Ctrl-C."
    if isinstance(error, UsageError):
        return EXIT_USAGE, f"error: {error}"
    if isinstance(error, Failure):
        return EXIT_FAILED, f"failed: {error}"
    described = None if _training or is_out_of_memory(error) else library_errors.describe(error)
    if described:
        can_fix, text = described
        text += library_errors.write_traceback(error)
        return (EXIT_USAGE, f"error: {text}") if can_fix else (EXIT_FAILED, f"failed: {text}")
    text = f"rank {os.environ.get('RANK', '0')} failed:\n{''.join(traceback.format_exception(error))}"
    if is_out_of_memory(error):
        text += (
            "\nThis rank ran out of memory: give half the --per_device_batch_size (the global batch stays the same; in an "
            "evaluation, --per_device_eval_batch_size), or --gradient_checkpointing true, and resume by the same command"
        )
    return EXIT_FAILED, text


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that memory ran out; torch has a class of its own for only some of these errors."""
    return _has_word(error, MEMORY_WORDS)


def _has_word(error: BaseException, words: tuple[str, ...]) -> bool:
    return any(word in str(error).lower() for word in words)


def _tell_launcher(message: str) -> None:
    """Write the error to the file from which torchrun quotes the first failure, as torchelastic's @record does."""
    with suppress(KeyError, OSError):  # no launcher, or its folder is full or gone
        error = {"message": message, "timestamp": int(time.time())}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(error))


def another_rank_failed() -> bool:
    """Return True if another rank of this launcher has failed: then the launcher ends this one, too."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return False
    own = Path(os.environ["TORCHELASTIC_ERROR_FILE"])  # FOLDER/LOCAL_RANK/error.json; each start has its own FOLDER
    return any(file != own for file in own.parents[1].glob("*/error.json"))


def _write_outcome(code: int, message: str) -> None:
    """Write the outcome to status.json, if this process has a run folder.

    The first failure counts: the errors of other ranks may follow from it."""
    if _run_folder is None:
        return
    outcome = "stopped" if code == EXIT_STOPPED else "failed"
    with suppress(OSError):
        status = run_status.read_status(_run_folder)
        if status.get("status") != "failed":
            # A failure has no step of its own: the last line's counts.
            step = max(status.get("step") or 0, jsonl.last_step(_run_folder / "metrics.jsonl"))
            run_status.write_status(_run_folder, outcome, step, code, message.strip().splitlines()[-1])


def print_once(message: str) -> None:
    """Print why this process ends. If several ranks of a launcher have the same message, only the first one prints it."""
    sys.stdout.flush()
    try:
        folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1]
        (folder / hashlib.sha256(message.encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return
    except (KeyError, OSError):
        pass  # no launcher, or its folder is full or gone
    print(f"\n{message}", file=sys.stderr, flush=True)
