"""What `make train` starts: the run folder, Ctrl-C, a closed terminal, nohup."""

import os
import pty
import re
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from engine.process import run_status
from tests.helpers import kit
from tests.helpers.stopping import check_saved, endless_run_file

MAKE_TRAIN = ["make", "-o", ".venv/done", "train"]
CTRL_C = b"\x03"


@pytest.fixture
def run_file(tmp_path) -> Path:
    """A run file that names its folder."""
    return endless_run_file(tmp_path, output_dir=str(tmp_path / "run"))


def processes_of(run_file: Path) -> list[psutil.Process]:
    """Return make, the launcher and the training processes of this run file."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(run_file) in " ".join(process.cmdline()):
                processes.append(process)
    return processes


@pytest.fixture(autouse=True)
def kill_what_a_failed_test_leaves(tmp_path):
    """Ranks have sessions of their own, which outlive the terminal."""
    yield
    for process in processes_of(tmp_path / "run.yaml"):
        process.kill()


class Terminal:
    """A command in a shell on a terminal of its own, with its output in a file."""

    def __init__(self, output: Path, *words):
        command = " ".join(f"'{word}'" for word in words)
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.chdir(kit.REPOSITORY)
            os.execvpe("sh", ["sh", "-c", f"trap : INT; {command} >'{output}' 2>&1; exit $?"], kit.PLAIN_ENVIRONMENT)

    def wait(self) -> int:
        """Return the exit code of the command, which its shell exits with after Ctrl-C, too."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def train_on_terminal(tmp_path: Path, run_file: Path, processes: int, *words) -> Terminal:
    """Start `make train` on a terminal, and return when it has trained a few steps."""
    before = kit.last_step(tmp_path / "run")
    words = [*words, *MAKE_TRAIN, f"CONFIG={run_file}", f"NPROC={processes}"]
    terminal = Terminal(tmp_path / "output.txt", *words)
    kit.until(lambda: kit.last_step(tmp_path / "run") > before + 3)
    return terminal


# ---- the run folder ----------------------------------------------------------------------------------------------------


def printed(target: str, *words) -> str:
    """Return the commands of a target, which make only prints."""
    command = ["make", "-o", ".venv/done", target, "-n", *words]
    return subprocess.run(command, cwd=kit.REPOSITORY, capture_output=True, text=True, check=True).stdout


def test_run_folder(run_file):
    """train.py chooses it, unless OUT or ARGS name it; the last flag wins."""
    config = f"CONFIG={run_file}"
    assert "--output_dir" not in printed("train", config)
    assert "--output_dir 'a b' --output_dir c" in printed("train", config, "OUT=a b", "ARGS=--output_dir c")
    command = printed("train", config).strip()
    assert f"python -m engine.tools.smoke {command}" in printed("smoke", config)


# ---- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.cluster
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.cluster)])
def test_run_is_saved_after_ctrl_c_and_resumes(run_file, tmp_path, processes):
    """On one process, until it is asked to stop, which is no error of make."""
    terminal = train_on_terminal(tmp_path, run_file, processes)
    os.write(terminal.file, CTRL_C)
    assert terminal.wait() != 0
    kit.until(lambda: not processes_of(run_file))
    text = (tmp_path / "output.txt").read_text()
    saved = check_saved(tmp_path / "run")
    assert text.count("saving after this step") == 1
    assert f"Stopped by Ctrl-C at step {saved:,}. Saved to {tmp_path / 'run'}" in text

    terminal = train_on_terminal(tmp_path, run_file, 1)
    (tmp_path / "run" / "stop").touch()
    assert terminal.wait() == 0
    text = (tmp_path / "output.txt").read_text()
    assert "Stopped by the file stop at step" in text
    assert not re.search("Error|Traceback", text)
    steps = [line["step"] for line in kit.timeless(tmp_path / "run")]
    assert steps == list(range(1, check_saved(tmp_path / "run") + 1))  # nothing trained twice, nothing lost


@pytest.mark.cluster
@pytest.mark.parametrize("words", [[], ["nohup"]])
def test_run_is_saved_when_its_terminal_closes_or_continues_under_nohup(run_file, tmp_path, words):
    terminal = train_on_terminal(tmp_path, run_file, 2, *words)
    os.close(terminal.file)
    if words:
        step = kit.last_step(tmp_path / "run")
        kit.until(lambda: kit.last_step(tmp_path / "run") > step + 20)
        (tmp_path / "run" / "stop").touch()
    kit.until(lambda: not processes_of(run_file))
    check_saved(tmp_path / "run")
    assert ("the file stop" in run_status.read_status(tmp_path / "run")["reason"]) == bool(words)
