"""Hang report: a rank that makes no progress for half of `ddp_timeout` names where it waits, and writes its stacks.

Tests: tests/distributed/test_hang_report.py.
"""

import faulthandler
import os
import threading
from pathlib import Path

from src.config.errors import warn
from src.config.paths import REPOSITORY
from src.distributed import host_group
from src.runtime import private_apis

SHARE = 0.5  # of ddp_timeout, after which a collective fails


class HangReport:
    """Reports each hang of this rank once; call `check` every second or so from another thread than the main one."""

    def __init__(self, folder: Path, rank: int, ddp_timeout: float):
        self.file, self.rank, self.patience = folder / "logs" / f"stacks_rank_{rank}.txt", rank, SHARE * ddp_timeout
        self.reported = 0.0  # the time of the last progress before the last hang
        # NCCL writes its last collectives beside the stacks if one of them times out.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder.absolute() / "logs" / "nccl_rank_"))

    def check(self, now: float) -> None:
        """Report a hang if the last sum over all ranks (one in every step) was too long before `now`."""
        idle = now - host_group.last_sum
        if idle < self.patience or self.reported == host_group.last_sum:
            return
        self.reported = host_group.last_sum
        place = waiting_place()
        with self.file.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        warn(
            f"rank {self.rank} has made no progress for {idle:.0f} s; it is in {place}; stacks: {self.file}. The ranks that "
            "wait in a sum or in a reduction of gradients wait for one that is elsewhere, or does not report",
            any_rank=True,
        )


def waiting_place() -> str:
    """Return "FUNCTION (FILE:LINE)" of this project that the main thread is in, and the line of train.py that called it."""
    lines, frame = [], private_apis.frame_of_thread(threading.main_thread())
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(REPOSITORY) and ".venv" not in path.parts:
            lines.append((frame.f_code.co_name, f"{path.relative_to(REPOSITORY)}:{frame.f_lineno}"))
        frame = frame.f_back
    if not lines:
        return "code outside of this project"
    of_loop = [place for _, place in lines if place.startswith("train.py:")]
    name, place = lines[0]
    return f"{name} ({place})" + (f", called at {of_loop[0]}" if of_loop and of_loop[0] != place else "")
