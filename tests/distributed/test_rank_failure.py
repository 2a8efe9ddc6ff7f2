"""An error on one rank ends all ranks soon, and the last thing printed is that error."""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from src.checkpointing import checkpoint_format, checkpoint_list
from src.config.errors import UsageError
from src.distributed import stop_signals
from src.runtime import exit_codes, run_status
from src.storage import atomic_folder
from src.storage.peer_failures import LaunchPeers
from src.tasks import causal_lm
from src.training import evaluation
from tests.helpers import kit


def recipe(tiny, **fields) -> list[str]:
    values = {"global_batch_size": 8, "per_device_batch_size": 2, "per_device_eval_batch_size": 1, "output_dir": "run"}
    values |= {"max_steps": 12, "learning_rate": 3e-3, "logging_steps": 1, "eval_steps": 6, "save_steps": 4}
    return kit.flags(**tiny | values | {"ddp_timeout": 600} | fields)


PLACES = {  # place -> (object, function, call that raises)
    "collator": (causal_lm.Task, "collate", 9),
    "forward": (causal_lm.Task, "loss", 9),
    "update": (train, "optimizer_step", 5),
    "evaluation": (evaluation, "seed_everything", 5),
    "save": (checkpoint_format, "save_file", 1),
    "build": (causal_lm.Task, "build", 1),
}


def raise_in(monkeypatch, place: str, rank: int, error: BaseException) -> None:
    """Raise `error` on one rank at a place of PLACES, or in one of its loader processes."""
    holder, name, first = PLACES[place]
    original, calls = getattr(holder, name), 0

    def failing_function(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls >= first and int(os.environ["RANK"]) == rank:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(holder, name, failing_function)


def _with_one_output(script, argv, folder) -> None:
    """Run the command with the output of all ranks in one file in order of time, as a terminal shows it."""
    shared = os.open(Path(folder) / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2, sys.stdout.fileno()):
        os.dup2(shared, number)
    kit._command(script, argv, folder)


def run_two_ranks(folder: Path, flags: list[str]) -> tuple[list, str, float]:
    """Return (exit codes, output of both ranks, seconds)."""
    start, codes = time.monotonic(), [0, 0]
    try:
        kit.spawn(2, _with_one_output, "train.py", flags, folder, out=folder / "out")
    except kit.RankFailed as failed:
        codes = failed.codes
    return codes, (folder / "output.txt").read_text(), time.monotonic() - start


def check_failed(folder: Path, flags: list[str], rank: int, message: str) -> str:
    """Assert that both ranks ended with 1, and that only the traceback of `rank` was printed, last; return it."""
    codes, text, seconds = run_two_ranks(folder, flags)
    assert codes == [1, 1], text
    assert seconds < 300  # ddp_timeout is 600
    assert re.findall(r"rank (\d+) failed:", text) == [str(rank)]
    text = re.sub(r"^\d{4}-\d\d-\d\d .*\n?", "", text, flags=re.M)  # a line of progress of the other rank may be late
    last = text[text.index(f"rank {rank} failed:\nTraceback") :].rstrip()
    assert message in last.splitlines()[-1]
    assert not re.search("[Cc]onnection|gloo|peer|warning", last)  # what the other rank saw
    return last


def check_recorded(folder: Path, rank: int, message: str) -> None:
    """Assert that the error is in the rank's log, in failed.json and in status.json."""
    log = (folder / "run" / "logs" / f"rank_{rank}.log").read_text()
    assert message in log[log.rindex("Traceback") :]
    failed = json.loads((folder / "run" / "logs" / "failed.json").read_text())
    assert failed["rank"] == rank
    assert message in failed["message"].strip().splitlines()[-1]
    status = run_status.read_status(folder / "run")
    assert (status["status"], status["exit_code"]) == ("failed", 1)
    assert message in status["reason"]


@pytest.mark.parametrize(
    "place, rank", [("collator", 0), ("forward", 1), ("update", 0), ("update", 1), ("evaluation", 1)]
)
def test_exception_on_one_rank(tiny, tmp_path, monkeypatch, place, rank):
    raise_in(monkeypatch, place, rank, ValueError("a cosmic ray"))
    last = check_failed(tmp_path, recipe(tiny), rank, "ValueError: a cosmic ray")
    assert "in failing_function" in last
    check_recorded(tmp_path, rank, "ValueError: a cosmic ray")


def test_exception_in_a_loader_process(tiny, tmp_path, monkeypatch):
    raise_in(monkeypatch, "collator", 1, ValueError("a cosmic ray"))
    last = check_failed(tmp_path, recipe(tiny, dataloader_num_workers=2), 1, "ValueError: a cosmic ray")
    assert "Caught ValueError in DataLoader worker process" in last


def test_exception_in_the_checkpoint_writer(tiny, tmp_path, monkeypatch):
    """An error of the code, unlike one of the disk, ends the run; no checkpoint is published."""
    raise_in(monkeypatch, "save", 0, ValueError("a cosmic ray"))
    check_failed(tmp_path, recipe(tiny), 0, "ValueError: a cosmic ray")
    assert checkpoint_list.list_checkpoints(tmp_path / "run") == []


@pytest.mark.parametrize(
    "place, error, helps",
    [
        ("forward", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB"), "--per_device_batch_size 1"),
        ("update", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "a smaller --per_device_batch_size"),
        ("evaluation", torch.OutOfMemoryError("CUDA out of memory"), "--per_device_eval_batch_size"),
    ],
)
def test_out_of_memory_names_what_helps(tiny, tmp_path, monkeypatch, place, error, helps):
    """In a step, in an update, whose first moments may not fit, and in an evaluation."""
    raise_in(monkeypatch, place, 1, error)
    last = check_failed(tmp_path, recipe(tiny), 1, "rank 1 ran out of memory")
    assert helps in last.splitlines()[-1]
    assert str(error) in last


@pytest.mark.parametrize("rank", [0, 1])
def test_exception_before_the_first_step(tiny, tmp_path, monkeypatch, rank):
    """There is no run folder yet in which ranks report to each other."""
    raise_in(monkeypatch, "build", rank, ValueError("a cosmic ray"))
    codes, text, seconds = run_two_ranks(tmp_path, recipe(tiny))
    assert codes == [1, 1], text
    assert seconds < 300  # ddp_timeout is 600
    assert "ValueError: a cosmic ray" in text
    assert re.findall(r"rank (\d+) failed:\nTraceback", text) == [str(rank)]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place, rank", [("build", 1), ("collator", 1), ("update", 0)])
def test_usage_error_on_one_rank(tiny, tmp_path, monkeypatch, place, rank):
    """A row or a file that only one rank reads, before the first step and in one: all ranks end with 2."""
    monkeypatch.setattr(exit_codes, "COMMON_ERROR_WAIT", 1.0)
    raise_in(monkeypatch, place, rank, UsageError("train_file: row 7 is bad"))
    codes, text, seconds = run_two_ranks(tmp_path, recipe(tiny))
    assert codes == [2, 2], text
    assert seconds < 300  # ddp_timeout is 600
    assert text.rstrip().endswith("error: train_file: row 7 is bad")
    assert text.count("error: ") == 1
    assert "failed:" not in text
    if place != "build":
        assert run_status.read_status(tmp_path / "run")["exit_code"] == 2


@pytest.mark.parametrize(
    "place, error, code", [("build", UsageError("row 7 is bad"), 2), ("forward", ValueError("a cosmic ray"), 1)]
)
def test_launcher_ends_the_others(tiny, tmp_path, monkeypatch, place, error, code):
    """torchrun sends SIGTERM as soon as one rank has ended: the others say nothing of a stop or a save."""
    monkeypatch.setattr(exit_codes, "COMMON_ERROR_WAIT", 0.5)
    raise_in(monkeypatch, place, 1, error)
    ranks = kit.Ranks("train.py", *recipe(tiny), folder=tmp_path / "here", world=2)
    kit.until(lambda: ranks.processes[1].exitcode is not None)
    ranks.signal(signal.SIGTERM, 0)
    assert ranks.wait() == [code, code], ranks.text()
    assert "SIGTERM" not in ranks.text()
    assert ranks.text().count(str(error)) == 1


def test_two_signals_end_the_wait_for_a_disk_that_hangs(tiny, tmp_path, monkeypatch):
    """Rank 0 would wait a minute for its checkpoint after rank 1 has failed."""
    monkeypatch.setattr(stop_signals, "COPY_SECONDS", 0.0)
    monkeypatch.setattr(atomic_folder, "publish", lambda *_, **__: time.sleep(600))
    raise_in(monkeypatch, "update", 1, ValueError("a cosmic ray"))
    ranks = kit.Ranks("train.py", *recipe(tiny), folder=tmp_path / "here", world=2)
    log = tmp_path / "here" / "run" / "logs" / "rank_0.log"
    kit.until(lambda: log.exists() and "rank 1 failed" in log.read_text())

    def signalled_again():  # a slow process may get two signals as one
        if ranks.processes[0].exitcode is None:
            ranks.signal(signal.SIGTERM, 0)
            time.sleep(0.1)
        return ranks.processes[0].exitcode is not None

    kit.until(signalled_again, 30)
    assert ranks.wait() == [128 + signal.SIGTERM, 1], ranks.text()
    assert "SIGTERM" not in ranks.text()


def test_stop_while_data_is_prepared(tiny, tmp_path, monkeypatch):
    """A rank that a signal ends is not one that failed, for a rank that gets the same signal later."""

    def wait(self):
        (tmp_path / f"waits{os.environ['RANK']}").touch()
        time.sleep(600)

    monkeypatch.setattr(causal_lm.Task, "load", wait)
    ranks = kit.Ranks("train.py", *recipe(tiny), folder=tmp_path / "here", world=2)
    kit.until(lambda: len(list(tmp_path.glob("waits*"))) == 2)
    ranks.signal(signal.SIGTERM, 1)
    kit.until(lambda: ranks.processes[1].exitcode is not None)
    ranks.signal(signal.SIGTERM, 0)
    assert ranks.wait() == [75, 75], ranks.text()
    assert ranks.text().count("Stopped by SIGTERM before training began") == 1


def test_crash_of_one_rank_ends_the_other(tiny, tmp_path, monkeypatch):
    """malloc notices a double free and aborts while it holds its lock: what prints the stacks must not need memory."""
    libc, original, calls = ctypes.CDLL(None), train.optimizer_step, 0
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def crash(*args):
        nonlocal calls
        calls += 1
        if calls == 3 and os.environ["RANK"] == "1":
            blocks = [libc.malloc(3000) for _ in range(3)]  # too large for the cache of a thread, which has no lock
            for _ in range(2):
                libc.free(blocks[1])
        return original(*args)

    monkeypatch.setattr(train, "optimizer_step", crash)
    monkeypatch.setattr(exit_codes, "ROOT_CAUSE_WAIT", 0.5)
    codes, text, _ = run_two_ranks(tmp_path, recipe(tiny))
    assert codes == [1, -signal.SIGABRT], text
    assert "in crash" in text  # the stack
    assert "rank 0 lost the connection to another rank" in text


def test_report_of_another_launch_is_ignored(tmp_path, monkeypatch):
    """A rank may fail later than its launcher was killed, in a folder where the next launch trains already."""
    (tmp_path / "logs").mkdir()
    for launch, rank in (("first", 1), ("second", 2)):
        monkeypatch.setattr(run_status, "launch", launch)
        assert run_status.failed_rank(tmp_path, 0) is None
        assert run_status.report_failure(tmp_path, rank, "a cosmic ray", rank)
        assert not run_status.report_failure(tmp_path, 0, "connection lost")
        assert (run_status.failed_rank(tmp_path, 0), run_status.failed_code(tmp_path)) == (str(rank), rank)


def test_resume_ignores_an_old_failure(tiny, tmp_path):
    failure = tmp_path / "run" / "logs" / "failed.json"
    failure.parent.mkdir(parents=True)
    failure.write_text(json.dumps({"rank": 1, "time": 0.0, "message": "old"}))
    codes, text, _ = run_two_ranks(tmp_path, recipe(tiny))
    assert codes == [0, 0], text
    assert not failure.exists()


def test_resume_after_a_failure(tiny, tmp_path, monkeypatch):
    undisturbed = kit.run_training(2, tmp_path / "undisturbed", *recipe(tiny))
    with monkeypatch.context() as patch:
        raise_in(patch, "evaluation", 1, ValueError("a cosmic ray"))
        check_failed(tmp_path, recipe(tiny), 1, "a cosmic ray")
    codes, text, _ = run_two_ranks(tmp_path, recipe(tiny))
    assert codes == [0, 0], text
    assert kit.same(kit.Run(tmp_path / "run").weights, undisturbed.weights)
    assert kit.timeless(tmp_path / "run") == kit.timeless(undisturbed.folder)
    assert run_status.read_status(tmp_path / "run")["status"] == "complete"


def test_mutant_ranks_that_do_not_report_to_each_other(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(run_status, "report_failure", lambda *args: True)
    monkeypatch.setattr(run_status, "failed_rank", lambda *args: None)
    monkeypatch.setattr(LaunchPeers, "other_error", lambda self: None)
    raise_in(monkeypatch, "forward", 1, ValueError("a cosmic ray"))
    with pytest.raises(AssertionError):
        check_failed(tmp_path, recipe(tiny), 1, "ValueError: a cosmic ray")
    text = (tmp_path / "output.txt").read_text()
    assert sorted(re.findall(r"rank (\d+) failed:", text)) == ["0", "1"]


LAUNCHER = """
import os, subprocess, sys, time
from src.storage import peer_failures
ended = subprocess.Popen(["true"])
os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
rank_0 = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1); open('ended', 'w')"], env={"LOCAL_RANK": "0"})
if (waiting := os.fork()) == 0:
    peer_failures.wait_for_local_rank_0(600)
    os._exit(not os.path.exists("ended"))
os._exit(os.waitstatus_to_exitcode(os.waitpid(waiting, 0)[1]))
"""


def test_wait_for_local_rank_0_ends_with_it(tmp_path):
    """Also beside processes that have ended, and if the launcher asks for the end of this rank first."""
    command, env = [sys.executable, "-c", LAUNCHER], os.environ | {"PYTHONPATH": str(kit.REPOSITORY)}
    assert subprocess.run(command, cwd=tmp_path, env=env, timeout=300, check=False).returncode == 0
