"""What has to happen before this process ends, on every path: trackers close, in bounded time."""

from collections.abc import Callable

_close: list[Callable[[float | None], bool]] = []
_exiting: list[bool] = []


def on_exit(close: Callable[[float | None], bool]) -> None:
    """Call `close(seconds)` before this process ends. It returns within that time (None: a time of its own), whether it
    was done, and may be called more than once, from any thread."""
    if close not in _close:
        _close.append(close)


def run_exit_hooks(seconds: float | None = None) -> bool:
    """Return whether everything is closed; call it before every `os._exit`, and at the normal end."""
    _exiting[:] = [bool(_close)]
    closed = [close(seconds) for close in _close]  # each of them, though one may not be done
    return all(closed)


def exiting() -> bool:
    """Return whether this process is about to end and only waits for its hooks."""
    return any(_exiting)
