"""The lock of the run folder: a second run is refused, and the lock ends with its process."""

import errno
import signal
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import filelock
import pytest

from engine.checkpointing import resume
from engine.config.errors import UsageError
from engine.process import run_lock, run_status
from tests.helpers import kit
from tests.helpers.stopping import begin, check_stopped, recipe


def test_second_run_in_a_folder_is_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "lock_run_folder", partial(run_lock.lock_run_folder, patience=0.5))
    flags, folder = recipe(tiny, max_steps=100_000), tmp_path / "run"
    first = begin(tmp_path, flags, world=1)
    second = kit.Ranks("train.py", *flags, "--output_dir", folder, folder=tmp_path / "elsewhere", world=2)
    assert second.wait() == [2, 2], second.text()
    assert "output_dir: another process trains in" in second.text()
    assert first.processes[0].is_alive()
    first.signal(signal.SIGTERM)
    step = check_stopped(first, folder)
    train_steps = [line["step"] for line in kit.timeless(folder) if line["kind"] == "train"]
    assert train_steps == list(range(1, step + 1))


@pytest.mark.parametrize("first_ends", [False, True])
def test_two_runs_begin_in_a_new_folder_at_the_same_moment(tiny, tmp_path, monkeypatch, first_ends):
    """The second one ends on all ranks, and leaves the status of the first one alone, though that has ended meanwhile."""

    def archive(*args):
        Path("chosen").touch()
        kit.until(Path("go").exists)
        original(*args)

    original, folder = resume.archive_stale_outputs, tmp_path / "run"
    flags = recipe(tiny, max_steps=100_000)
    with monkeypatch.context() as patch:
        patch.setattr(run_lock, "lock_run_folder", partial(run_lock.lock_run_folder, patience=0.5))
        patch.setattr(resume, "archive_stale_outputs", archive)
        second = kit.Ranks("train.py", *flags, "--output_dir", folder, folder=tmp_path / "elsewhere", world=2)
    kit.until((tmp_path / "elsewhere" / "chosen").exists)
    first = begin(tmp_path, flags, world=1)
    if first_ends:
        first.signal(signal.SIGTERM)
        check_stopped(first, folder)
    (tmp_path / "elsewhere" / "go").touch()
    assert second.wait() == [2, 2], second.text()
    assert run_status.read_status(folder)["status"] == ("stopped" if first_ends else "running")
    if not first_ends:
        first.signal(signal.SIGTERM)
        check_stopped(first, folder)


class FileAlone:
    """The mutant: a lock that is only a file."""

    def __init__(self, file, **options):
        self.file = file

    def acquire(self, timeout):
        try:
            self.file.touch(exist_ok=False)
        except FileExistsError as error:
            raise filelock.Timeout(str(self.file)) from error


HOLD = """
import sys, time
from pathlib import Path
from engine.process import run_lock
from tests.engine.process.test_run_lock import FileAlone
if sys.argv[2] == "True":
    run_lock.FileLock = FileAlone
run_lock.lock_run_folder(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("mutant", [False, True])
def test_lock_ends_with_a_killed_process(tmp_path, monkeypatch, mutant):
    if mutant:
        monkeypatch.setattr(run_lock, "FileLock", FileAlone)
    words = [sys.executable, "-c", HOLD, tmp_path, str(mutant)]
    holder = subprocess.Popen(words, cwd=kit.REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "locked\n"
    refused = f"output_dir: another process trains in {tmp_path}: end it, or give another"
    with pytest.raises(UsageError, match=refused):
        run_lock.lock_run_folder(tmp_path, 0)
    holder.kill()
    holder.communicate()
    with pytest.raises(UsageError, match=refused) if mutant else nullcontext():
        run_lock.lock_run_folder(tmp_path, 0)


def test_folder_without_locks_is_a_warning(tmp_path, monkeypatch, capfd):
    def acquire(*args, **options):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    for _ in range(2):
        run_lock.lock_run_folder(tmp_path)
    assert capfd.readouterr().err.count("cannot be locked (No locks available)") == 1
