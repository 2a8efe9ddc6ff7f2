"""Complete lines with the time, and nothing of a library."""

import os
import re
import subprocess
import sys

import pytest

from engine.process import console
from tests.helpers import kit
from tests.helpers.backend_runs import recipe

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "TOKENIZERS_", "HF_HUB_DIS"))}


@pytest.mark.cluster
def test_lines_in_a_file(files, tmp_path):
    flags = recipe(files, max_steps=6, logging_steps=2, eval_steps=3, output_dir="run")
    command = [sys.executable, str(kit.REPOSITORY / "train.py"), *flags]
    with open(tmp_path / "out.txt", "wb") as output:
        done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, stdout=output, stderr=output, check=False)
    text = (tmp_path / "out.txt").read_bytes().decode()
    assert done.returncode == 0, text
    assert "\r" not in text
    assert text.endswith("\n")
    assert len(re.findall(rf"^{TIME} step \d+/6 loss [\d.]+ lr \S+ [\d,]+ tokens/s ETA \d:\d\d:\d\d$", text, re.M)) == 3
    text = re.sub(r"\[.*real_accelerator.py.*\n", "", text)  # DeepSpeed, if it is installed: accelerate imports it
    ours = (
        f"{TIME} ",
        "Importing ",
        "  [a-z]",
        "train$",
        "eval$",
        "run  ",
        "model  ",
        "1 checkpoint",
        "weights sha256 ",
        "$",
    )
    assert [line for line in text.splitlines() if not re.match("|".join(ours), line)] == []  # nothing of a library


@pytest.mark.cluster  # starts train.py twice
def test_full_disk_of_the_output_does_not_end_a_run(files, tmp_path):
    """The mutant keeps the streams as they are."""
    flags = recipe(files, max_steps=2, logging_steps=1, output_dir="run")
    mutant = "from engine.process import exit_codes; exit_codes._without_disk_errors = lambda method: method; "
    for before, code in (("", 0), (mutant, 1)):
        program = f"{before}import train; train.run_main(train.main)"
        command = [sys.executable, "-c", program, *flags, "--resume", "never"]
        environment = ENVIRONMENT | {"PYTHONPATH": str(kit.REPOSITORY)}
        with open("/dev/full", "wb") as output:
            done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=output, stderr=output, check=False)
        assert done.returncode == code


def test_a_run_without_end_has_a_last_day(capsys):
    """`max_steps: 10**12` with `time_limit`, say: Python's timedelta holds no longer time than 2.7 million years."""
    shown = console.Console(10**12, "tokens", 0)
    shown.start -= 10_000
    shown.line({"kind": "train", "step": 10, "loss": 1.0, "learning_rate": 1e-3, "tokens_per_second": 3.0})
    assert "ETA 115740740 days" in capsys.readouterr().out
