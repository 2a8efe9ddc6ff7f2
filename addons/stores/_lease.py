"""The lease of a run in a store: one run writes there, and another one takes over when it has ended.

The lease is a row of small files, .lease/1.json, .lease/2.json, …: whoever creates the next number holds it. A store that
refuses to create a name twice lets one of two runs do so. The holder creates the next number every few seconds, and before
each manifest: then it knows that it holds the lease, by the store's word and not by a clock.
Tests: tests/addons/stores/test_lease.py.
"""

import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from addons.stores._store import Store
from engine.config.errors import Failure, UsageError, warn, warn_once

FOLDER = ".lease"
JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "AWS_BATCH_JOB_ID", "SKYPILOT_TASK_ID")  # kept when a job is requeued


class Lease:
    """The lease of one process. `seconds`: how long it lasts without a renewal; `launch`: the name of this launch."""

    def __init__(self, store: Store, seconds: float, launch: str):
        self.store = store
        self.seconds = seconds
        job = next((f"{name} {os.environ[name]}" for name in JOBS if os.environ.get(name)), "")
        self.holder = {
            "token": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "machine": _machine(),
            "process": os.getpid(),
            "started": _started(os.getpid()),
            "job": job,
            "launch": launch,
        }
        self.number = 0  # of the newest file of this process; 0: none
        self.lost = ""  # why this run may not write any more
        self.guard = threading.Lock()
        self.ended = threading.Event()

    # ---- take it -----------------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Take the lease, and renew it in the background. Raise UsageError if another run holds it.

        The lease of a process of this machine that is dead, or of the same job, is taken at once; that of another machine
        when it was not renewed for its time."""
        if not self.store.is_conditional:
            warn(
                f"output_dir: {self.store.address}: this store cannot refuse a second run: make sure that nothing else trains there"
            )
        first, holder = self.newest()
        number = first
        began = time.monotonic()
        while not self._is_free(holder):
            if number != first:  # it was renewed meanwhile
                raise UsageError(self._refusal(holder))
            if time.monotonic() - began > holder["seconds"]:
                break
            warn_once(f"{self._sentence(holder)}: waiting up to {holder['seconds']:g} s for its end")
            time.sleep(min(1.0, holder["seconds"] / 10))
            number, holder = self.newest()
        if not self._create(number + 1):
            raise UsageError(self._refusal(self.newest()[1]))
        threading.Thread(target=self._keep, name="lease", daemon=True).start()

    def wait_for(self, seconds: float) -> str:
        """Wait until the main process of this launch holds the lease; return its token."""
        end = time.monotonic() + seconds
        while True:
            _, holder = self.newest()
            if holder.get("launch") == self.holder["launch"] and not holder.get("released"):
                return holder["token"]
            if time.monotonic() > end:
                raise UsageError(f"output_dir: {self.store.address}: the main process has not taken its lease")
            time.sleep(0.5)

    def newest(self) -> tuple[int, dict[str, Any]]:
        """Return the number and the contents of the newest file; (0, {}) if there is none."""
        number = 0
        for _ in range(20):
            number = max((int(Path(name).stem) for name in self.store.list(FOLDER)), default=0)
            text = self.store.read(_name(number)) if number else b"{}"
            with suppress(ValueError):  # deleted meanwhile, as there is a newer one; or still being written, on a disk
                return number, json.loads(text or b"")
            time.sleep(0.1)
        return number, {}  # of a process that was killed while it wrote to a disk

    def _is_free(self, holder: dict[str, Any]) -> bool:
        if not holder or holder.get("released"):
            return True
        if holder["machine"] == self.holder["machine"]:
            return _started(holder["process"]) != holder["started"]
        is_old = time.time() - holder["time"] > 2 * holder["seconds"]  # clocks may differ, by less than the lease
        is_same_job = holder["job"] != "" and holder["job"] == self.holder["job"]
        return is_old or is_same_job

    def _create(self, number: int, **more: Any) -> bool:
        """Create the file of this number, and remove earlier ones; return whether the lease is this run's."""
        values = self.holder | {"time": time.time(), "seconds": self.seconds} | more
        created = self.store.create(_name(number), json.dumps(values).encode())
        is_sure = (
            created and self.store.is_conditional
        )  # else this process may have created it, and missed the response
        if not is_sure and self.holder["token"].encode() not in (self.store.read(_name(number)) or b""):
            return False
        numbers = sorted(int(Path(name).stem) for name in self.store.list(FOLDER))
        if numbers[-1] != number:  # this process slept while others went on, and removed that number
            self.store.delete(_name(number))
            return False
        self.number = number
        self.store.delete(*map(_name, numbers[:-1]))
        return True

    def _sentence(self, holder: dict[str, Any]) -> str:
        renewed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.get("time")))
        who = f"process {holder.get('process')} on {holder.get('host')}"
        if holder.get("job"):
            who += f" ({holder['job']})"
        return f"{self.store.address}: {who} trains there and renewed its lease at {renewed}"

    def _refusal(self, holder: dict[str, Any]) -> str:
        return f"output_dir: {self._sentence(holder)}: end it, or give another --output_dir"

    # ---- keep it -----------------------------------------------------------------------------------------------------

    def renew(self) -> None:
        """Renew the lease. Raise Failure if another run has taken it, OSError if the store does not answer."""
        with self.guard:
            if not self.lost and not self._create(self.number + 1):
                _, holder = self.newest()
                self.lost = (
                    f"{self._sentence(holder)}: it has taken over from this run, which may not write there any more"
                )
            self.check()

    def check(self) -> None:
        """Raise Failure if another run has taken the lease."""
        if self.lost:
            raise Failure(self.lost)

    def check_holder(self, token: str) -> None:
        """Raise Failure if the lease is not that of this token, on a process that does not hold it itself."""
        holder = self.newest()[1]
        if holder.get("token") != token:
            raise Failure(f"{self._sentence(holder)}: this run may not write there any more")

    def _keep(self) -> None:
        while not self.ended.wait(self.seconds / 4) and not self.lost:
            with suppress(OSError, Failure):  # the store may come back; the loop of the training asks `check`
                self.renew()

    def release(self) -> None:
        """Give the lease back, so that the next run need not wait."""
        self.ended.set()
        with self.guard:
            if self.number and not self.lost:
                self._create(self.number + 1, released=True)
                self.number = 0


def _name(number: int) -> str:
    return f"{FOLDER}/{number}.json"


# ---- processes -------------------------------------------------------------------------------------------------------


def _machine() -> str:
    """Return what two processes share if each sees the other one: the boot of the machine, and the list of processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _started(process: int) -> str:
    """Return when a process of this machine started, an empty text if it has ended: numbers are used again."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return ""
    try:
        os.kill(process, 0)
    except OSError:
        return ""
    return "unknown"
