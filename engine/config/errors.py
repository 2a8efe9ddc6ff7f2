"""Errors that end every rank (exit codes 2, 1 and 75), errors of a disk, warnings, and suggestions for misspelled names.

Tests: tests/engine/config/test_config.py, tests/engine/config/test_bad_input.py.
"""

import difflib
import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class UsageError(Exception):
    """An error that the user can fix; its message names file, line or field, value, and fix. All ranks exit with 2."""


class Failure(Exception):
    """An error after which the run cannot continue and which all ranks know. All ranks exit with 1."""


class Stopped(Exception):
    """A requested stop: the run has saved, and the same command resumes it. All ranks exit with 75."""


def warn(text: str, any_rank: bool = False) -> None:
    """Print a warning on local rank 0 only; with `any_rank`, on every rank that calls this."""
    if any_rank or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"warning: {text}\n", end="", file=sys.stderr, flush=True)  # one write, because other threads print, too


# Variables of the environment that libraries read.
VARIABLE = "; see the environment variable "
SETTINGS = re.compile(
    r"(ACCELERATE|FSDP|PARALLELISM|HF|TRANSFORMERS|TORCH|NCCL|MASTER)_|.*(RANK|WORLD_SIZE|_PROXY)$", re.I
)

said: set[str] = set()  # kinds of warnings that `warn_once` has printed in this process
_kept: list[dict[str, Any]] = []


def warn_once(text: str, kind: str = "") -> None:
    """Print a warning about rows on local rank 0, the first of its kind in this process; a kind is by default the text.

    Within `kept_warnings`, only keep it."""
    kind = kind or text
    if _kept:
        _kept[-1].setdefault(kind, text)
    elif kind not in said:
        said.add(kind)
        warn(text)


class Counted(NamedTuple):
    """Rows of one kind: where the first one is, and how many there are."""

    first: str
    number: int


def count_rows(kind: str, location: object) -> None:
    """Count a row, whose kind is what a note says of all of them; `location` becomes text for the first one only."""
    if not _kept:  # a stream
        warn_once(f"{location}: {kind}", kind)
        return
    first, number = _kept[-1].get(kind) or (str(location), 0)
    _kept[-1][kind] = Counted(first, number + 1)


@contextmanager
def kept_warnings() -> Iterator[dict[str, Any]]:
    """Within, `warn_once` adds to this dictionary of kind -> text, and `count_rows` of kind -> Counted: who prepares rows
    is not always who prints."""
    _kept.append({})
    try:
        yield _kept[-1]
    finally:
        _kept.pop()


def call_or_warn(what: str, call: Callable, *args) -> Any:
    """Return `call(*args)`. On any error warn and return None; use it where an error must not end the run."""
    try:
        return call(*args)
    except Exception as error:
        warn(f"{what} failed (the run is not affected): {type(error).__name__}: {one_line(error)}", any_rank=True)
        return None


def one_line(error: BaseException, length: int = 300) -> str:
    """Return the beginning of an error message as one line, or without a message the type of the error."""
    text = " ".join(str(error).split())[:length] or type(error).__name__
    return f"{text}: save the file as UTF-8" if isinstance(error, UnicodeDecodeError) else text


def reason_of(error: BaseException) -> str:
    """Return an error message as one line, with the package to install, or the variable of the environment that it quotes.

    Before the message of a KeyError, which is the key alone, stands its type."""
    text = f"KeyError: {one_line(error)}" if isinstance(error, KeyError) else one_line(error)
    if isinstance(error, ImportError):
        named = [name for name in pinned_extras() if re.search(rf"\b{name}\b", text, re.I)]
        return "; install it: ".join([text, *map(how_to_install, named)])
    for name, value in os.environ.items():
        is_word = value.lower() not in ("", "0", "1", "true", "false", "no", "yes")
        if is_word and SETTINGS.match(name) and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text, re.I):
            return f"{text}{VARIABLE}{name}"
    return text


def pinned_extras() -> dict[str, str]:
    """Return {package: version} of requirements-extra.txt."""
    file = Path(__file__).parents[2] / "requirements-extra.txt"
    lines = file.read_text(encoding="utf-8") if file.exists() else ""
    return dict(re.findall(r"^([\w-]+)==(\S+)", lines, re.M))


def how_to_install(name: str) -> str:
    """Return the command that installs a package, in the version of requirements-extra.txt if that has it."""
    version = pinned_extras().get(name)
    return f".venv/bin/pip install {name}" + (f"=={version}" if version else "")


@contextmanager
def errors_of(*what: object) -> Iterator[None]:
    """Within, any exception becomes a UsageError that begins with `what`: for calls of libraries, and of a user's code.

    `what` becomes text only then, because the location of a row reads its file."""
    try:
        yield
    except Exception as error:
        raise UsageError(": ".join([*map(str, what), reason_of(error)])) from error


@contextmanager
def may_be_removed(what: str) -> Iterator[None]:
    """Within, a missing module of the engine becomes a UsageError: docs/forking.md says that a copy may remove `what`."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = error.name or ""
        if not name.startswith("engine."):
            raise
        file = name.replace(".", "/") + ".py"
        raise UsageError(f"{what}: this copy has removed {file}: restore it, or do without {what}") from None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return '; did you mean X?' for the nearest of `names`, or an empty string."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def list_errors(errors: list[str]) -> str:
    """Join errors into one message; if there are several, begin with their number."""
    if len(errors) == 1:
        return errors[0]
    return f"{len(errors)} errors:\n" + "\n".join(f"  {error}" for error in errors)


# ---- disks that are full or cannot be written to -----------------------------------------------------------------------

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def is_unwritable(error: BaseException, root: Path) -> bool:
    """Return True if the disk is full or read-only, or if `root` does not permit to write."""
    denied = isinstance(error, PermissionError) and str(error.filename).startswith(str(root))
    return isinstance(error, OSError) and (error.errno in DISK_FULL or denied)


@contextmanager
def writes_to(root: Path, field: str) -> Iterator[None]:
    """Within, an error of a full or read-only disk becomes a UsageError: `field` of the run file names the folder."""
    try:
        yield
    except OSError as error:
        if not is_unwritable(error, root):
            raise
        is_denied = isinstance(error, PermissionError) or error.errno == errno.EROFS
        fix = f"{'make it writable' if is_denied else 'free disk space'}, or give another --{field}"
        raise UsageError(f"{field}: {root} cannot be written ({error.strerror}): {fix}") from error
