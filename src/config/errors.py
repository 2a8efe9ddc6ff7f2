"""Errors for users (exit codes 2, 1, 75) and warnings; look up files that a run file names; read YAML.

Tests: tests/config/test_config.py and tests/config/test_bad_input.py.
"""

import difflib
import os
import sys


class UsageError(Exception):
    """The user can mend this; the message names the culprit and the way out. Ends every rank with exit code 2."""


class Failure(Exception):
    """The run cannot go on, as all ranks know alike; ends every rank with exit code 1 and this sentence."""


class Stopped(Exception):
    """The run was asked to stop, and everything is saved; ends every rank with exit code 75, and may be started again."""


def warn(text: str, alone: bool = False) -> None:
    """Say on each node once what somebody asked for and does not get; `alone`: no other process knows."""
    if alone or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"warning: {text}\n", end="", file=sys.stderr, flush=True)  # in one piece: threads warn, too


def optional(what: str, call, *args):
    """Return what `call(*args)` returns; its failure is a warning, for output that no run may fail for."""
    try:
        return call(*args)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        warn(f"{what} failed, the run is not affected: {type(error).__name__}: {reason}", alone=True)
        return None


def did_you_mean(name: str, names) -> str:
    """Return '; did you mean X?' for the nearest of `names`, or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
