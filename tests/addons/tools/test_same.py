"""`make same`: two commits that train the same numbers, and one that does not on two processes."""

import re
import subprocess
import sys

from tests.helpers import kit


def git(folder, *words):
    author = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True)


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
