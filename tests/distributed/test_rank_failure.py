"""A rank that fails prints its error and ends; the launcher names the first failure and ends the other ranks."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

import train
from src.checkpointing import checkpoint_format, checkpoint_list
from src.config.errors import UsageError
from src.distributed import stop_signals
from src.runtime import run_status
from src.storage import atomic_folder
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


def run_two_ranks(folder: Path, flags: list[str]) -> tuple[list, list[str]]:
    """Return the exit codes and the outputs of both ranks, which no launcher ends."""
    start = time.monotonic()
    codes, texts = kit.run_command("train.py", *flags, folder=folder, world=2)
    assert time.monotonic() - start < 300  # ddp_timeout is 600
    return codes, texts


def check_failed(folder: Path, flags: list[str], rank: int, message: str) -> str:
    """Assert that both ranks ended with 1, and that `rank` printed its traceback last; return it."""
    codes, texts = run_two_ranks(folder, flags)
    assert codes == [1, 1], texts
    last = texts[rank][texts[rank].index(f"rank {rank} failed:\nTraceback") :].rstrip()
    assert message in last.splitlines()[-1]
    assert not re.search("[Cc]onnection|gloo|peer|warning", last)  # what the other rank saw
    assert f"rank {1 - rank} lost the connection to another rank" in texts[1 - rank]
    return last


def check_recorded(folder: Path, rank: int, message: str) -> None:
    """Assert that the error is in the rank's log and in status.json."""
    log = (folder / "run" / "logs" / f"rank_{rank}.log").read_text()
    assert message in log[log.rindex("Traceback") :]
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
    raise_in(monkeypatch, "build", rank, ValueError("a cosmic ray"))
    codes, texts = run_two_ranks(tmp_path, recipe(tiny))
    assert codes == [1, 1], texts
    assert texts[rank].rstrip().endswith("ValueError: a cosmic ray")
    assert re.findall(r"rank (\d+) failed:\n.*Traceback", texts[rank]) == [str(rank)]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place, rank", [("build", 1), ("collator", 1), ("update", 0)])
def test_usage_error_on_one_rank(tiny, tmp_path, monkeypatch, place, rank):
    """A row or a file that only one rank reads, before the first step and in one: the run has exit code 2."""
    raise_in(monkeypatch, place, rank, UsageError("train_file: row 7 is bad"))
    codes, texts = run_two_ranks(tmp_path, recipe(tiny))
    assert (codes[rank], codes[1 - rank]) == (2, 1), texts
    assert "error: train_file: row 7 is bad" in texts[rank]
    assert "failed:" not in texts[rank]
    if place != "build":
        status = run_status.read_status(tmp_path / "run")
        assert (status["exit_code"], status["reason"]) == (2, "train_file: row 7 is bad")  # not the lost connection


# ---- with a launcher ---------------------------------------------------------------------------------------------------

FAILING = """
import os, signal, sys, time
sys.path.insert(0, {repository!r})
import train
from src.config.errors import UsageError
from src.runtime.exit_codes import run_main
from src.tasks import causal_lm

def fail(*args, **kwargs):
    if os.environ["RANK"] != "1":
        return original(*args, **kwargs)
    {statement}

original = {place}
{place} = fail
run_main(train.main)
"""
BUILD, LOSS = "causal_lm.Task.build", "causal_lm.Task.loss"


def launch(folder: Path, flags: list[str], place: str, statement: str) -> str:
    """Return what torchrun and two ranks print if rank 1 executes a statement instead of a function."""
    script = folder / "failing.py"
    script.write_text(FAILING.format(repository=str(kit.REPOSITORY), place=place, statement=statement))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script, *flags]
    env = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert time.monotonic() - start < 300
    assert not any(str(script) in " ".join(words) for words in command_lines())
    return done.stdout + done.stderr


def command_lines() -> list[list[str]]:
    """Return the command lines of all processes."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found.append(process.cmdline())
    return found


def root_cause(text: str) -> str:
    """Return the report of the launcher about the rank that failed first."""
    return text[text.index("Root Cause (first observed failure):") :]


def test_launcher_names_the_rank_that_failed_first(tiny, tmp_path):
    text = launch(tmp_path, recipe(tiny), LOSS, 'raise ValueError("a cosmic ray")')
    assert "rank 1 failed:\nTraceback" in text
    assert re.search(r"rank +: 1 ", root_cause(text))
    assert "ValueError: a cosmic ray" in root_cause(text)
    assert "saving after this step" not in text  # the SIGTERM of the launcher is no request to stop
    assert run_status.read_status(tmp_path / "run")["reason"] == "ValueError: a cosmic ray"


def test_launcher_ends_ranks_that_wait_for_one_that_failed(tiny, tmp_path):
    """Rank 0 is in a call that no signal interrupts, before the first step."""
    text = launch(tmp_path, recipe(tiny), BUILD, 'raise UsageError("row 7 is bad")')
    assert text.count("\nerror: row 7 is bad") == 1
    assert "Stopped by SIGTERM" not in text
    assert "row 7 is bad" in root_cause(text)


def test_launcher_ends_the_others_after_a_death(tiny, tmp_path):
    text = launch(tmp_path, recipe(tiny), LOSS, "os.kill(os.getpid(), signal.SIGKILL)")
    assert "Signal 9 (SIGKILL)" in root_cause(text)
    assert run_status.read_status(tmp_path / "run")["status"] == "failed"


def test_error_that_all_ranks_meet_is_printed_once(tiny, tmp_path):
    text = launch(tmp_path, recipe(tiny, learning_rate="fast"), BUILD, "pass")
    assert text.count("\nerror: ") == 1
    assert "--learning_rate" in root_cause(text)


def test_two_signals_end_the_wait_for_a_disk_that_hangs(tiny, tmp_path, monkeypatch):
    """Rank 0 would wait a minute for its checkpoint after rank 1 has failed."""
    monkeypatch.setattr(stop_signals, "COPY_SECONDS", 0.0)
    monkeypatch.setattr(atomic_folder, "publish", lambda *_, **__: time.sleep(600))
    raise_in(monkeypatch, "update", 1, ValueError("a cosmic ray"))
    ranks = kit.Ranks("train.py", *recipe(tiny), folder=tmp_path / "here", world=2)
    kit.until(lambda: "rank 0 failed" in ranks.text())

    def signaled_again():  # a slow process may get two signals as one
        if ranks.processes[0].exitcode is None:
            ranks.signal(signal.SIGTERM, 0)
            time.sleep(0.1)
        return ranks.processes[0].exitcode is not None

    kit.until(signaled_again, 30)
    assert ranks.wait() == [128 + signal.SIGTERM, 1], ranks.text()


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
    codes, texts = run_two_ranks(tmp_path, recipe(tiny))
    assert codes == [1, -signal.SIGABRT], texts
    assert "in crash" in texts[1]  # the stack
    assert "rank 0 lost the connection to another rank" in texts[0]


def test_resume_after_a_failure(tiny, tmp_path, monkeypatch):
    undisturbed = kit.run_training(2, tmp_path / "undisturbed", *recipe(tiny))
    with monkeypatch.context() as patch:
        raise_in(patch, "evaluation", 1, ValueError("a cosmic ray"))
        check_failed(tmp_path, recipe(tiny), 1, "a cosmic ray")
    codes, texts = run_two_ranks(tmp_path, recipe(tiny))
    assert codes == [0, 0], texts
    assert kit.same(kit.Run(tmp_path / "run").weights, undisturbed.weights)
    assert kit.timeless(tmp_path / "run") == kit.timeless(undisturbed.folder)
    assert run_status.read_status(tmp_path / "run")["status"] == "complete"
