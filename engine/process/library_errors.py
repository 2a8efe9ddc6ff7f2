"""Errors that libraries raise before training begins: what was being done, the cause, and the fix, in one sentence.

They are about files, addresses, variables and packages. An error of the code itself has no sentence: it needs its traceback.
Tests: tests/engine/process/test_library_errors.py.
"""

import errno
import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

from engine.config.errors import VARIABLE, reason_of
from engine.config.paths import REPOSITORY

CODE = ("engine", "src", "addons", "tests", "__main__", "train", "eval", "builtins")  # no library is named so
COMPUTING = ("torch", "numpy", "scipy", "sklearn", "triton", "pydantic")  # their errors are about values of the code
RENDEZVOUS = "torch.distributed"  # DistNetworkError: a port in use, a host without an address
NETWORK = (
    RENDEZVOUS,
    "httpx2",
    "httpcore2",
    "httpx",
    "httpcore",
    "requests",
    "urllib",
    "urllib3",
    "aiohttp",
    "botocore",
)
LIBRARIES = "site-packages"
ENTRIES = ("<module>", "main", "train", "run_main")  # functions that say nothing about what is being done

_folder: Path | None = None


def keep_tracebacks_in(folder: str | Path) -> None:
    """Choose the run folder: its logs/ get the tracebacks of errors that are printed as one sentence."""
    global _folder
    _folder = Path(folder)


def describe(error: BaseException) -> tuple[bool, str] | None:
    """Return (whether the user can fix an error, a sentence about it); None for an error of the code itself."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if _is_own(frame)]
    if not _is_of_library(error, frames, own):
        return None
    steps = [frame.f_code.co_name for frame in own if frame.f_code.co_name not in ENTRIES]
    doing = (steps or ["start"])[0].strip("_").replace("_", " ")
    kind = "" if isinstance(error, OSError | ImportError) else f"{type(error).__name__}: "
    reason = reason_of(error)
    file = next(_files(frames), "")
    where = f" (file {file})" if file and kind and file not in reason else ""
    is_of_network = isinstance(error, ConnectionError | TimeoutError) or _library(error) in NETWORK
    is_unclear = type(error) is RuntimeError and VARIABLE not in reason
    can_fix = not (is_of_network or is_unclear or getattr(error, "errno", None) == errno.EIO)
    return can_fix, f"cannot {doing}: {kind}{reason}{where}"


def _is_of_library(error: BaseException, frames: list[FrameType], own: list[FrameType]) -> bool:
    """Return whether an error is about the surroundings: by its type, or because a library raised it for the engine.

    What a library raises for code of src/ or addons/ may come from a mistake there."""
    if isinstance(error, ImportError):
        return (error.name or "").partition(".")[0] not in CODE
    if isinstance(error, OSError | EOFError | UnicodeError):
        return True
    if _library(error) not in (*CODE, *COMPUTING):
        return isinstance(error, Exception)
    if type(error) not in (ValueError, RuntimeError, Exception):
        return False
    by_engine = bool(own) and Path(own[-1].f_code.co_filename).is_relative_to(REPOSITORY / "engine")
    return VARIABLE in reason_of(error) or (by_engine and frames[-1] is not own[-1])


def _library(error: BaseException) -> str:
    module = type(error).__module__
    return module if module == RENDEZVOUS else module.partition(".")[0]


def _is_own(frame: FrameType) -> bool:
    path = Path(frame.f_code.co_filename)
    return path.is_relative_to(REPOSITORY) and LIBRARIES not in path.parts


def _files(frames: list[FrameType]) -> Iterator[str]:
    """Yield the files that the variables of the frames name, of the innermost frame first."""
    for frame in reversed(frames):
        for value in list(frame.f_locals.values()):
            with suppress(OSError, ValueError):  # a text that is no path
                if isinstance(value, str | Path) and Path(value).is_file() and LIBRARIES not in str(value):
                    yield str(value)


def write_traceback(error: BaseException) -> str:
    """Append the traceback to logs/rank_N.log of the run folder. Return the path; nothing if it cannot be written."""
    folder = Path(tempfile.gettempdir()) if _folder is None else _folder / "logs"
    file = folder / ("traceback.txt" if _folder is None else f"rank_{os.environ.get('RANK', '0')}.log")
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as log:
            log.write("".join(traceback.format_exception(error)))
        return str(file)
    return ""
