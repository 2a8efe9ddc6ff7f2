"""Errors that libraries raise before training begins: what was being done, the cause, and the fix, in one sentence.

They are about files, addresses, variables and packages. An error of the code itself has no sentence: it needs its traceback.
Tests: tests/engine/process/test_library_errors.py.
"""

import errno
import os
import re
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType

from engine.config.errors import VARIABLE, reason_of
from engine.config.paths import REPOSITORY

CODE = ("engine", "src", "addons", "tests", "__main__", "train", "eval", "builtins")  # no library is named so
COMPUTING = ("torch", "numpy", "scipy", "sklearn", "triton", "pydantic")  # their errors are about values of the code
NETWORK = re.compile(r"connect|timed? ?out|network|name resolution|not known", re.I)
LIBRARIES = "site-packages"
ENTRIES = ("<module>", "main", "train", "run_main")  # functions that say nothing about what is being done

_logs = Path(tempfile.gettempdir())  # of a program without a run folder


def keep_tracebacks_in(folder: str | Path) -> None:
    """Choose the run folder: its logs/ get the tracebacks of errors that are printed as one sentence."""
    global _logs
    _logs = Path(folder, "logs")


def describe(error: BaseException) -> tuple[bool, str] | None:
    """Return (whether the user can fix an error, a sentence about it); None for an error of the code itself."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if _is_own(frame)]
    if not _is_of_library(error, frames, own):
        return None
    steps = [frame.f_code.co_name for frame in own if frame.f_code.co_name not in ENTRIES]
    doing = (steps or ["start"])[0].strip("_").replace("_", " ")
    text = reason_of(error)
    if not isinstance(error, OSError | ImportError):  # these name their file or package
        text = f"{type(error).__name__}: {text}"
        values = (value for frame in reversed(frames) for value in [*frame.f_locals.values()])
        files = (str(value) for value in values if isinstance(value, str | Path) and os.path.isfile(value))
        text += next((f" (file {file})" for file in files if LIBRARIES not in file), "")
    is_unclear = type(error) is RuntimeError and VARIABLE not in text
    can_fix = not (is_unclear or getattr(error, "errno", None) == errno.EIO or NETWORK.search(text))
    return can_fix, f"cannot {doing}: {text}"


def _is_of_library(error: BaseException, frames: list[FrameType], own: list[FrameType]) -> bool:
    """Return whether an error is about the surroundings: by its type, or because a library raised it for the engine.

    What a library raises for code of src/ or addons/ may come from a mistake there."""
    if isinstance(error, ImportError):
        return (error.name or "").partition(".")[0] not in CODE
    if isinstance(error, OSError | EOFError | UnicodeError):
        return True
    module = type(error).__module__
    if module.partition(".")[0] not in (*CODE, *COMPUTING) or module == "torch.distributed":
        return isinstance(error, Exception)
    if type(error) not in (ValueError, RuntimeError, Exception):
        return False
    by_engine = bool(own) and Path(own[-1].f_code.co_filename).is_relative_to(REPOSITORY / "engine")
    return VARIABLE in reason_of(error) or (by_engine and frames[-1] is not own[-1])


def _is_own(frame: FrameType) -> bool:
    path = Path(frame.f_code.co_filename)
    return path.is_relative_to(REPOSITORY) and LIBRARIES not in path.parts


def write_traceback(error: BaseException) -> str:
    """Append the traceback to logs/rank_N.log of the run folder. Return where it is; nothing if it cannot be written."""
    file = _logs / f"rank_{os.environ.get('RANK', '0')}.log"
    with suppress(OSError):
        _logs.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as log:
            log.write("".join(traceback.format_exception(error)))
        return f" (traceback: {file})"
    return ""
