"""A rank that fails prints its error and ends; the launcher names the first failure and ends the other ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from engine.config.errors import UsageError
from engine.process import run_status
from src.tasks import causal_lm
from src.training import evaluation
from tests.helpers import kit, stopping


def recipe(tiny, **fields) -> list[str]:
    return stopping.recipe(tiny, **{"max_steps": 12, "eval_steps": 6, "save_steps": 4, "ddp_timeout": 600} | fields)


@pytest.mark.parametrize(
    "place, rank, error, code, said",
    [
        ((evaluation, "seed_everything", 5), 0, ValueError("a cosmic ray"), 1, "ValueError: a cosmic ray"),
        ((causal_lm.Task, "collate", 9), 0, ValueError("a cosmic ray"), 1, "ValueError: a cosmic ray"),
        ((causal_lm.Task, "loss", 9), 1, torch.OutOfMemoryError("out of memory"), 1, "half the --per_device"),
        ((train, "optimizer_step", 5), 0, UsageError("train_file: row 7 is bad"), 2, "train_file: row 7 is bad"),
    ],
)
def test_error_on_one_rank_ends_both(tiny, tmp_path, monkeypatch, place, rank, error, code, said):
    """Without a launcher. It is the last that the rank prints, and is in its log and in status.json; `place` is (object,
    function, call)."""
    (holder, name, first), calls = place, 0
    original = getattr(holder, name)

    def failing_function(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls >= first and int(os.environ["RANK"]) == rank:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(holder, name, failing_function)
    codes, texts = kit.run_command("train.py", *recipe(tiny), folder=tmp_path, world=2)  # in half of ddp_timeout
    assert (codes[rank], codes[1 - rank]) == (code, 1), texts
    assert f"rank {1 - rank} failed" in texts[1 - rank]
    last = texts[rank][texts[rank].index("\nerror: " if code == 2 else f"\nrank {rank} failed:\nTraceback") :]
    assert said in last.rstrip().splitlines()[-1]
    assert ("in failing_function" in last) == (code == 1)
    assert not re.search("[Cc]onnection|gloo|peer|warning", last)  # what the other rank saw
    assert said in (tmp_path / "run" / "logs" / f"rank_{rank}.log").read_text()
    status = run_status.read_status(tmp_path / "run")
    assert (status["status"], status["exit_code"]) == ("failed", code)
    assert said in status["reason"]


# ---- with a launcher ---------------------------------------------------------------------------------------------------

FAILING = """
import os, signal, sys
sys.path.insert(0, {repository!r})
import train
from engine.process.exit_codes import run_main
from src.tasks import causal_lm

def fail(*args, **kwargs):
    if os.environ["RANK"] != "1":
        return original(*args, **kwargs)
    raise ValueError("a cosmic ray")

original, causal_lm.Task.loss = causal_lm.Task.loss, fail
run_main(train.main)
"""


def launch(folder: Path, flags: list[str]) -> tuple[str, str]:
    """Return what torchrun and two ranks print, if rank 1 fails in its first forward pass, and of it the launcher's
    report about the rank that failed first."""
    script = folder / "failing.py"
    script.write_text(FAILING.format(repository=str(kit.REPOSITORY)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script, *flags]
    env = kit.PLAIN_ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    options = {"cwd": folder, "env": env, "capture_output": True, "text": True, "timeout": 300, "check": False}
    done = subprocess.run([str(word) for word in command], **options)
    assert done.returncode == 1
    text = done.stdout + done.stderr
    return text, text[text.index("Root Cause (first observed failure):") :]


def test_launcher_names_the_rank_that_failed_first(tiny, tmp_path):
    text, report = launch(tmp_path, recipe(tiny))
    assert "rank 1 failed:\nTraceback" in text
    assert re.search(r"rank +: 1 ", report)
    assert "ValueError: a cosmic ray" in report
    assert "saving after this step" not in text  # the SIGTERM of the launcher is no request to stop
    assert run_status.read_status(tmp_path / "run")["reason"] == "ValueError: a cosmic ray"


def test_error_that_all_ranks_meet_is_printed_once(tiny, tmp_path):
    text, report = launch(tmp_path, recipe(tiny, learning_rate="fast"))
    assert text.count("\nerror: ") == 1
    assert "--learning_rate" in report
