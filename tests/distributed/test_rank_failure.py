"""A rank that fails prints its error and ends; the launcher names the first failure and ends the other ranks."""

import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

import train
from src.checkpointing import tensor_files
from src.config.errors import UsageError
from src.runtime import run_status
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
    "save": (tensor_files, "save_file", 1),
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
    return codes, [re.sub(r"\[.*real_accelerator.py.*\n", "", text) for text in texts]  # DeepSpeed, if it is installed


def check_failed(folder: Path, flags: list[str], rank: int, message: str) -> str:
    """Assert that both ranks ended with 1, and that `rank` printed its traceback last; return it."""
    codes, texts = run_two_ranks(folder, flags)
    assert codes == [1, 1], texts
    last = texts[rank][texts[rank].index(f"rank {rank} failed:\nTraceback") :].rstrip()
    assert message in last.splitlines()[-1]
    assert not re.search("[Cc]onnection|gloo|peer|warning", last)  # what the other rank saw
    assert f"rank {1 - rank} failed" in texts[1 - rank]
    return last


def check_recorded(folder: Path, rank: int, message: str) -> None:
    """Assert that the error is in the rank's log and in status.json."""
    log = (folder / "run" / "logs" / f"rank_{rank}.log").read_text()
    assert message in log[log.rindex("Traceback") :]
    status = run_status.read_status(folder / "run")
    assert (status["status"], status["exit_code"]) == ("failed", 1)
    assert message in status["reason"]


@pytest.mark.parametrize("place, rank", [("collator", 0), ("forward", 1), ("evaluation", 1)])
def test_exception_on_one_rank(tiny, tmp_path, monkeypatch, place, rank):
    raise_in(monkeypatch, place, rank, ValueError("a cosmic ray"))
    last = check_failed(tmp_path, recipe(tiny), rank, "ValueError: a cosmic ray")
    assert "in failing_function" in last
    check_recorded(tmp_path, rank, "ValueError: a cosmic ray")


def test_out_of_memory_names_what_helps(tiny, tmp_path, monkeypatch):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
    raise_in(monkeypatch, "forward", 1, error)
    last = check_failed(tmp_path, recipe(tiny), 1, "rank 1 ran out of memory")
    assert "give half the --per_device_batch_size" in last.splitlines()[-1]
    assert str(error) in last


@pytest.mark.parametrize("place, rank", [("build", 1), ("update", 0)])
def test_usage_error_on_one_rank(tiny, tmp_path, monkeypatch, place, rank):
    """Before the first step, and in one: the run has exit code 2."""
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
    lines = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            lines.append(process.cmdline())
    return lines


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


@pytest.mark.cluster
def test_launcher_ends_the_others_after_a_death(tiny, tmp_path):
    text = launch(tmp_path, recipe(tiny), LOSS, "os.kill(os.getpid(), signal.SIGKILL)")
    assert "Signal 9 (SIGKILL)" in root_cause(text)
    assert run_status.read_status(tmp_path / "run")["status"] == "failed"


def test_error_that_all_ranks_meet_is_printed_once(tiny, tmp_path):
    text = launch(tmp_path, recipe(tiny, learning_rate="fast"), BUILD, "pass")
    assert text.count("\nerror: ") == 1
    assert "--learning_rate" in root_cause(text)
