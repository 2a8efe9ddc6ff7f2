"""Errors that end every rank (exit codes 2, 1 and 75), warnings, and suggestions for misspelled names.

Tests: tests/config/test_config.py, tests/config/test_bad_input.py.
"""

import difflib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any


class UsageError(Exception):
    """What the user can fix; the message names file, line or field, value, and fix. Exit code 2 on every rank."""


class Failure(Exception):
    """The run cannot continue, and all ranks know it. Exit code 1 on every rank."""


class Stopped(Exception):
    """The run was asked to stop and has saved; the same command resumes it. Exit code 75 on every rank."""


def warn(text: str, any_rank: bool = False) -> None:
    """Print a warning from local rank 0 only, or with `any_rank` from every process that calls this."""
    if any_rank or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"warning: {text}\n", end="", file=sys.stderr, flush=True)  # one write: other threads print, too


def call_or_warn(what: str, call: Callable, *args) -> Any:
    """Return `call(*args)`; on any error warn and return None, for output that must not end a run."""
    try:
        return call(*args)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        warn(f"{what} failed, the run is not affected: {type(error).__name__}: {reason}", any_rank=True)
        return None


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that `name` is probably a misspelling of, or None."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return close[0] if close else None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return '; did you mean X?' for the nearest of `names`, or nothing."""
    close = nearest(name, names)
    return f"; did you mean {close}?" if close else ""


def list_errors(errors: list[str]) -> str:
    """Return one message for all errors."""
    if len(errors) == 1:
        return errors[0]
    return f"{len(errors)} errors:\n" + "\n".join(f"  {error}" for error in errors)
