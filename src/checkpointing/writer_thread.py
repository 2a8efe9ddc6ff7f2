"""The background thread that writes a checkpoint; a process that ends because of an error waits for it first.

The data of a write in progress are in host memory already, so an error after the copy need not cost the checkpoint.
Tests: tests/checkpointing/test_async_writer.py.
"""

import threading
import time
from collections.abc import Callable

from src.runtime.exit_codes import on_exit

NAME = "checkpoint writer"
EXIT_WAIT = 60.0  # seconds that a process that ends waits for its write; a launcher may kill it sooner


def start(work: Callable[..., None], *args) -> threading.Thread:
    """Call `work(*args)` in a new thread, for which this process waits before it exits, at most EXIT_WAIT seconds."""
    on_exit(finish)
    thread = threading.Thread(target=work, args=args, name=NAME, daemon=True)
    thread.start()
    return thread


def finish(seconds: float | None = None) -> bool:
    """Wait for the write in progress, at most `seconds` (None: EXIT_WAIT); return True if none is in progress."""
    end = time.monotonic() + (EXIT_WAIT if seconds is None else seconds)
    writing = [
        thread for thread in threading.enumerate() if thread.name == NAME
    ]  # no reference: a writer holds the model
    for thread in writing:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in writing)
