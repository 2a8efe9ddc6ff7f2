"""Complete lines in a file, bars on a terminal."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading

import pytest

from src.runtime import console
from tests.helpers import kit

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
STEP = rf"{TIME} step \d+/6 loss [\d.]+ lr \S+ [\d,]+ tokens/s ETA \d:\d\d:\d\d"
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "TOKENIZERS_", "HF_HUB_DIS"))}


def recipe(files, folder) -> list[str]:
    fields = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "output_dir": folder / "run"}
    fields |= {"validation_file": files / "validation.jsonl", "max_steps": 6, "logging_steps": 2, "eval_steps": 3}
    return kit.flags(**fields)


def train_on_terminal(terminal: int, argv: list[str]) -> None:
    import train

    for descriptor in (1, 2):
        os.dup2(terminal, descriptor)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (open until the process ends)
    train.main(argv)


def test_lines_in_a_file(files, tmp_path):
    command = [sys.executable, str(kit.REPOSITORY / "train.py"), *recipe(files, tmp_path)]
    with open(tmp_path / "out.txt", "wb") as output:
        done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, stdout=output, stderr=output, check=False)
    text = (tmp_path / "out.txt").read_bytes().decode()
    assert done.returncode == 0, text
    assert "\r" not in text
    assert text.endswith("\n")
    assert len(re.findall(f"^{STEP}$", text, re.M)) == 3
    assert len(re.findall(rf"^{TIME} evaluation at step \d: loss [\d.]+, .*perplexity", text, re.M)) == 2
    assert len(re.findall(rf"^{TIME} step 6 saved in \S+/checkpoints/step_00000006; training paused", text, re.M)) == 1
    text = re.sub(r"\[.*real_accelerator.py.*\n", "", text)  # DeepSpeed, if it is installed: accelerate imports it
    ours = (f"{TIME} ", "  [a-z]", "train$", "eval$", "run  ", "model  ", "1 checkpoint", "$")
    assert [line for line in text.splitlines() if not re.match("|".join(ours), line)] == []  # nothing of a library


def test_library_messages_leave_a_stream_that_is_closed():
    """A library may be imported while stderr is another stream, as in a test that captures the output."""
    code = """if True:
        import contextlib, io, logging
        from src.runtime import console

        with contextlib.redirect_stderr(io.StringIO()) as captured:
            logging.getLogger("library").addHandler(logging.StreamHandler())
        captured.close()
        console.prepare()
        logging.getLogger("library.module").error("a message")
        assert console.unwritten() == "library.module: a message\\n"
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=kit.REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_bars_on_a_terminal(files, tmp_path):
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
    chunks = []

    def read():
        try:
            while data := os.read(parent, 1 << 16):
                chunks.append(data)
        except OSError:  # the other end is closed
            return

    reader = threading.Thread(target=read)
    reader.start()
    kit.spawn(1, train_on_terminal, child, recipe(files, tmp_path), out=tmp_path / "out")
    os.close(child)
    reader.join()
    text = b"".join(chunks).decode()
    for pattern in (r"\rtraining: +\d+%", r"\revaluation: +\d+%", "evaluation at step 6: loss", "step 6 saved in "):
        assert re.search(pattern, text)
    assert not re.search(TIME, text)


def test_progress_lines(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    bar = console.bar("evaluation", 1000, "batch")
    for _ in range(3):
        bar.update()  # too early for a line
        clock[0] += console.LINE_SECONDS + 1
        bar.update(100)
        bar.update(0)
    console.bar("downloading x", None, "B", shown=False).update(10**9)
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(f"^{TIME} ", "", line).split(", ETA")[0] for line in lines] == [
        f"evaluation: {count} of 1,000 batches" for count in (101, 202, 303)
    ]


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_line_without_a_loss(kind, capsys):
    shown = console.Console(True, 10, "tokens", 0)
    rest = {"learning_rate": None, "tokens_per_second": 0.0} if kind == "train" else {"weight": 0.0}
    shown.line({"kind": kind, "step": 1, "loss": None} | rest)
    assert "loss none" in capsys.readouterr().out


def test_metrics_of_sources_and_averages_stand_apart(capsys):
    shown = console.Console(True, 10, "tokens", 0)
    metrics = {"loss": 2.5, "weight": 10, "code/loss": 2.25, "code/weight": 4, "ema/loss": 1.5, "ema/code/loss": 1.25}
    shown.line({"kind": "eval", "step": 1} | metrics)
    groups = "loss 2.5000, weight 10; code: loss 2.2500, weight 4; ema: loss 1.5000; ema/code: loss 1.2500\n"
    assert capsys.readouterr().out.endswith(f"evaluation at step 1: {groups}")
