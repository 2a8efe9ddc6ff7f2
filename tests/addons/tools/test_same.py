"""`make same`: two commits that train the same numbers, and one that does not on two processes; two runs."""

import re
import subprocess
import sys

from tests.helpers import kit


def git(folder, *words):
    author = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True)


def compare(one, other) -> tuple[int, str]:
    command = [sys.executable, "-m", "addons.tools.same", str(one), str(other)]
    done = subprocess.run(command, cwd=kit.REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout + done.stderr


def test_two_runs(tiny, tmp_path):
    """On one and on two processes, and with another rate."""
    fields = tiny | {"max_steps": 6, "save_steps": 2, "save_total_limit": 9, "logging_steps": 3, "exact_sums": True}
    fields |= {"global_batch_size": 8, "per_device_batch_size": 2, "lr_scheduler_type": "linear", "learning_rate": 1e-3}
    one, two = (kit.run_training(n, tmp_path / str(n), *kit.flags(**fields)).folder for n in (1, 2))
    code, text = compare(one, two)
    assert code == 0, text
    assert text.count("equal") == 4  # three checkpoints, and the lines
    other = kit.run_training(1, tmp_path / "other", *kit.flags(**fields | {"warmup_steps": 1})).folder
    code, text = compare(one, other)
    assert code == 1
    assert "weights sha256 of step_00000002: " in text
    assert "first difference: the train line of step 3: " in text
    code, text = compare(one, tmp_path)
    assert (code, "metrics.jsonl" in text) == (1, True)


def test_changed_number_is_reported(tmp_path):
    copy = tmp_path / "copy"
    names = ["train.py", "engine", "src", "addons", "configs"]
    copy.mkdir()
    subprocess.run(["cp", "-r", *names, str(copy)], cwd=kit.REPOSITORY, check=True)
    git(copy, "init", "-q")
    git(copy, "add", "-A")
    git(copy, "commit", "-q", "-m", "base")
    step = (copy / "train.py").read_text()
    changed = step.replace("backend.loss_scale(totals)", "backend.loss_scale(totals) * backend.data_world_size**0.0001")
    assert changed != step
    (copy / "train.py").write_text(changed)  # not committed; one process trains the same numbers
    command = [sys.executable, "-m", "addons.tools.same", "HEAD", "--only", "one_process", "two_processes"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "one_process: bitwise equal" in done.stdout
    assert "train line of step 3: loss: " in done.stdout
    assert re.search(r"two_processes: \d+ DIFFERENCES", done.stdout)
