"""In a file a run prints complete lines of its own; a bar is for terminals."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest

from src.runtime import console
from tests.helpers import kit

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
STEP = rf"{TIME} step \d+/6 loss [\d.]+ lr \S+ [\d,]+ tokens/s ETA \d:\d\d:\d\d"
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "TOKENIZERS_", "HF_HUB_DIS"))}


def command(script, files, folder, **flags):
    values = {"model_config": files / "llama.yaml", "validation_file": files / "validation.jsonl"} | flags
    if script == "train.py":
        values |= {"train_file": files / "train.jsonl", "max_steps": 6, "logging_steps": 2, "eval_steps": 3}
    words = [str(word) for name, value in values.items() for word in (f"--{name}", value)]
    return [sys.executable, str(kit.REPOSITORY / script), "--output_dir", str(folder / "run"), *words]


def test_a_run_prints_whole_lines_of_its_own_to_a_file(files, tmp_path):
    with open(tmp_path / "out.txt", "wb") as out:
        done = subprocess.run(
            command("train.py", files, tmp_path), cwd=tmp_path, env=ENVIRONMENT, stdout=out, stderr=out
        )
    text = (tmp_path / "out.txt").read_bytes().decode()
    assert done.returncode == 0, text
    assert "\r" not in text
    assert text.endswith("\n")
    assert len(re.findall(f"^{STEP}$", text, re.M)) == 3
    assert len(re.findall(rf"^{TIME} evaluation at step \d: loss [\d.]+, .*perplexity", text, re.M)) == 2
    assert len(re.findall(rf"^{TIME} step 6 saved in \S+/checkpoints/step_00000006; training paused", text, re.M)) == 1
    ours = (f"{TIME} ", "  [a-z]", "train$", "eval$", "run  ", "model  ", "1 checkpoint", "$")
    assert [line for line in text.splitlines() if not re.match("|".join(ours), line)] == []


def test_a_terminal_gets_bars_and_lines_above_them(files, tmp_path):
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
    argv, taken = command("train.py", files, tmp_path), []

    def read():
        try:
            while data := os.read(parent, 1 << 16):
                taken.append(data)
        except OSError:  # the other end is closed
            return

    reader = threading.Thread(target=read)
    reader.start()
    done = subprocess.run(argv, cwd=tmp_path, env=ENVIRONMENT, stdout=child, stderr=child)
    os.close(child)
    reader.join()
    text = b"".join(taken).decode()
    assert done.returncode == 0, text
    assert re.search(r"\rtraining: +\d+%", text)
    assert re.search(r"\revaluation: +\d+%", text)
    assert re.search(r"evaluation at step 6: loss", text)
    assert re.search(r"step 6 saved in ", text)
    assert not re.search(TIME, text)


def test_long_work_prints_a_line_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(console, "LINE_SECONDS", 0.05)
    bar = console.bar("evaluation", 1000, "batch")
    for _ in range(3):
        bar.update()  # too soon for a line
        time.sleep(0.06)
        bar.update(100)
        bar.update(0)
    console.bar("downloading x", None, "B", shown=False).update(10**9)
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(f"^{TIME} ", "", line).split(", ETA")[0] for line in lines] == [
        "evaluation: 101 of 1,000 batches",
        "evaluation: 202 of 1,000 batches",
        "evaluation: 303 of 1,000 batches",
    ]


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_a_line_without_a_loss_is_shown(kind, capsys):
    shown = console.Console(True, 10)
    shown.begin(0)
    rest = {"learning_rate": None, "tokens_per_second": 0.0} if kind == "train" else {"weight": 0.0}
    shown.line({"kind": kind, "step": 1, "loss": None} | rest)
    assert "loss none" in capsys.readouterr().out
