"""What make starts: run folder, threads, signals on a terminal, exit codes, and no output of the launcher."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from src.checkpointing import checkpoint_list
from src.distributed import quiet_launcher, run_launcher
from src.runtime import run_status
from tests.helpers import kit

PLAIN_ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "OMP_"))}
LAUNCHER_OUTPUT = ("Traceback", "OMP_NUM_THREADS", "had defaults used", "torch.distributed", "CalledProcessError")
CTRL_C = b"\x03"


class Terminal:
    """A command on a terminal of its own."""

    started: list[int] = []

    def __init__(self, *words, env=None):
        self.pid, self.file = pty.fork()
        self.started.append(self.pid)
        if self.pid == 0:
            os.chdir(kit.REPOSITORY)
            os.execvpe(str(words[0]), [str(word) for word in words], PLAIN_ENVIRONMENT | (env or {}))
        self.text = ""

    def read(self, seconds: float) -> bool:
        """Take what is printed within this time; return whether the command may print more."""
        if not select.select([self.file], [], [], seconds)[0]:
            return True
        try:
            new = os.read(self.file, 1 << 16).decode(errors="replace")
        except OSError:
            return False
        self.text += new.replace("\r\n", "\n")
        return bool(new)

    def until(self, condition, timeout: float = 300) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert self.read(0.05), self.text
            assert time.monotonic() < end, self.text

    def press(self, key: bytes) -> None:
        os.write(self.file, key)

    def training_process(self) -> int:
        """Return the process of SCRIPT when it handles signals."""
        self.until(lambda: re.search(r"ready (\d+)\n", self.text))
        return int(re.search(r"ready (\d+)\n", self.text)[1])

    def lines(self, timeout: float = 300) -> list[str]:
        """Return all lines, without those of make and the terminal's ^C, when the command has ended."""
        end = time.monotonic() + timeout
        while self.read(0.2):
            assert time.monotonic() < end, self.text
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.started.remove(self.pid)
        lines = [line.strip() for line in self.text.splitlines()]
        return [line for line in lines if line and not line.startswith("make") and line != "^C"]


@pytest.fixture(autouse=True)
def kill_what_a_failed_test_leaves():
    """Ranks have sessions of their own, which outlive the terminal."""
    yield
    while Terminal.started:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(Terminal.started.pop())
            for each in [*process.children(recursive=True), process]:
                each.kill()


def run(words: list, env=None) -> subprocess.CompletedProcess:
    command = [str(word) for word in words]
    options = {"cwd": kit.REPOSITORY, "env": PLAIN_ENVIRONMENT | (env or {}), "timeout": 300, "check": False}
    return subprocess.run(command, capture_output=True, text=True, **options)


def make_train(*words) -> list:
    return ["make", "-s", "-o", ".venv/done", "train", *words]


@pytest.fixture
def endless(tmp_path) -> Path:
    """A run file that names its folder, for more steps than any test waits for."""
    fields = {name: str(value) for name, value in kit.tiny_files(tmp_path).items()}
    fields |= {"global_batch_size": 8, "per_device_batch_size": 2, "max_steps": 10**6, "logging_steps": 1}
    return kit.write_yaml(tmp_path / "run.yaml", fields | {"output_dir": str(tmp_path / "own")})


# ---- before the launch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "yaml, flags, folder",
    [
        ({}, [], "default"),
        ({"output_dir": "of yaml"}, [], "of yaml"),
        ({"output_dir": "of_yaml"}, ["--output_dir", "a b"], "a b"),
        ({}, ["--output_dir=c", "--seed", "1"], "c"),
        ({}, ["--output-dir", "d"], "d"),
        ({}, ["--output_dir", "e", "--output_dir", "f"], "f"),
    ],
)
def test_run_folder(tmp_path, yaml, flags, folder):
    path = kit.write_yaml(tmp_path / "run.yaml", {"seed": 1} | yaml)
    words = ["--config_file", "x.yaml", "train.py", "--config", str(path), *flags]
    found, completed = run_launcher.find_run_folder("default", words)
    assert found == Path(folder)
    assert completed == words + ["--output_dir", "default"] * (folder == "default")


def test_threads_per_process():
    cores = psutil.cpu_count(logical=False)

    def threads(name, processes=None):
        config_file = str(kit.REPOSITORY / "accelerate_configs" / f"{name}.yaml")
        args = Namespace(config_file=config_file, num_processes=processes, num_machines=None, cpu=False)
        return quiet_launcher.threads_per_process(args)

    assert threads("cpu") == cores
    assert threads("cpu_ddp") == max(1, cores // 2)  # two processes in the file
    assert threads("cpu_ddp", processes=cores) == 1
    assert threads("cpu_ddp", processes=10 * cores) == 1
    assert threads("ddp", processes=1) == 1  # GPUs compute


# ---- Ctrl-C ------------------------------------------------------------------------------------------------------------


def test_ctrl_c_under_make_on_two_processes(endless, tmp_path):
    """One line when it is pressed, one at the end. The run folder of the flag has a space in its name."""
    folder = tmp_path / "a run"
    terminal = Terminal(*make_train(f"CONFIG={endless}", "NPROC=2", f"ARGS=--output_dir '{folder}'"))
    terminal.until(lambda: kit.last_step(folder) > 3)
    terminal.press(CTRL_C)
    lines = terminal.lines()
    step = checkpoint_list.step_of(checkpoint_list.newest_intact(folder))
    assert step == kit.last_step(folder)
    assert lines[-1] == f"Stopped by Ctrl-C at step {step}. Saved to {folder}; run the same command to resume."
    assert terminal.text.count("saving after this step") == 1
    assert lines[0].startswith("accelerate launch ")
    assert not [name for name in LAUNCHER_OUTPUT if name in terminal.text]
    assert "Error 75" in terminal.text
    assert not (tmp_path / "own").exists()
    threads = max(1, psutil.cpu_count(logical=False) // 2)
    assert f"{threads} thread{'s' * (threads > 1)} per rank" in (folder / "environment.json").read_text()


@pytest.mark.parametrize("how", ["make", "python"])
def test_ctrl_c_before_training_begins(endless, tmp_path, how):
    """During the imports of the launcher, or of train.py."""
    words = make_train(f"CONFIG={endless}") if how == "make" else [sys.executable, "train.py", "--config", endless]
    terminal = Terminal(*words)
    process = Path(f"/proc/{terminal.pid}")

    def imports() -> bool:
        if how == "make":
            return "accelerate launch" in terminal.text
        return (
            "train.py" in (process / "cmdline").read_text().split("\0") and "libtorch" in (process / "maps").read_text()
        )

    terminal.until(imports)
    terminal.press(CTRL_C)
    assert "Stopped by Ctrl-C before training began" in terminal.lines()[-1]
    assert "Traceback" not in terminal.text
    assert not (tmp_path / "own").exists()


SCRIPT = """
import os, signal, sys, time
from contextlib import suppress
count = 0
def handle(number, _):
    global count
    count += 1
    with open(sys.argv[-1] + ".txt", "a") as file:
        file.write(signal.Signals(number).name)
    with suppress(OSError):  # the terminal may be closed
        print("got", signal.Signals(number).name, flush=True)
    if count == 2:
        os._exit(1)
signal.signal(signal.SIGINT, handle)
signal.signal(signal.SIGTERM, handle)
print("ready", os.getpid(), flush=True)
time.sleep(600)
os._exit(1)
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def launch_command(script: Path) -> list:
    """Return a command that launches `script` for a run in the folder `run` beside it."""
    config = kit.REPOSITORY / "accelerate_configs" / "cpu.yaml"
    launcher = [sys.executable, "-m", "src.distributed.run_launcher", script.parent / "run"]
    return [*launcher, "--", "--config_file", config, script]


def test_ctrl_z_pauses_and_both_ctrl_c_are_passed_on(script):
    terminal = Terminal(*launch_command(script))
    worker = psutil.Process(terminal.training_process())
    os.kill(terminal.pid, signal.SIGTSTP)
    kit.until(lambda: worker.status() == psutil.STATUS_STOPPED)
    os.kill(terminal.pid, signal.SIGCONT)  # fg
    kit.until(lambda: worker.status() != psutil.STATUS_STOPPED)
    for count in (1, 2):
        terminal.press(CTRL_C)
        terminal.until(lambda count=count: terminal.text.count("got SIGINT") == count)
    terminal.lines()
    assert terminal.code == 130
    assert "Traceback" not in terminal.text


COMPLETED_SCRIPT = """
import sys
from pathlib import Path
from src.runtime import run_status
run_status.write_status(Path(sys.argv[-1]), "stopped", 3, 75)
print("Saved", flush=True)
"""
SLOW_EXIT = """
import atexit, sys, time
if "src.distributed.quiet_launcher" in " ".join(sys.orig_argv):
    atexit.register(time.sleep, 20)
"""


def test_ctrl_c_after_the_run_has_ended(script, tmp_path):
    """The training process has saved and ended; the launcher is about to end."""
    script.write_text(COMPLETED_SCRIPT)
    (tmp_path / "run").mkdir()
    (tmp_path / "sitecustomize.py").write_text(SLOW_EXIT)
    terminal = Terminal(*launch_command(script), env={"PYTHONPATH": f"{kit.REPOSITORY}:{tmp_path}"})
    terminal.until(lambda: "Saved" in terminal.text)
    [launcher] = psutil.Process(terminal.pid).children()
    terminal.until(lambda: not launcher.children() or time.sleep(0.1))
    terminal.press(CTRL_C)
    assert terminal.lines()[-1] == "Saved"
    assert terminal.code == 75


def test_closed_terminal_sends_sigterm(script, tmp_path):
    """SIGHUP would end the training process unsaved."""
    terminal = Terminal(*launch_command(script))
    worker = terminal.training_process()
    os.close(terminal.file)
    received = tmp_path / "run.txt"
    kit.until(lambda: received.exists() and received.read_text())
    assert received.read_text() == "SIGTERM"
    os.kill(worker, signal.SIGKILL)
    os.waitpid(terminal.pid, 0)
    terminal.started.remove(terminal.pid)


def test_nohup_is_respected(script, tmp_path):
    output = tmp_path / "output.txt"
    command = [str(word) for word in ["nohup", *launch_command(script)]]
    with output.open("w") as file:
        process = subprocess.Popen(command, cwd=kit.REPOSITORY, env=PLAIN_ENVIRONMENT, stdout=file, stderr=file)
    kit.until(lambda: "ready" in output.read_text())
    process.send_signal(signal.SIGHUP)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    kit.until(lambda: "got" in output.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 128 + signal.SIGTERM
    assert re.findall("got (.*)", output.read_text()) == ["SIGTERM", "SIGTERM"]


# ---- exit codes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "launcher_code, signals, training, run_code, expected",
    [
        (0, [], True, None, 0),
        (2, [], True, None, 2),
        (1, [15], True, None, 75),  # stopped before there was a status.json
        (1, [2, 2], True, None, 130),
        (1, [2], False, None, 130),  # an evaluation saves nothing
        (1, [15], True, 75, 75),
        (1, [], True, 75, 75),
    ],
)
def test_exit_code(launcher_code, signals, training, run_code, expected):
    assert run_launcher.exit_code(launcher_code, signals, training, run_code) == expected


def test_status_of_another_launch_is_ignored(tmp_path):
    """Launchers in containers often have the same process id; a run that still trains keeps its status.json."""
    launcher = run_launcher.Launcher.__new__(run_launcher.Launcher)
    launcher.folder, launcher.process = tmp_path, Namespace(pid=os.getppid())
    launcher.start_time = time.time() + 60
    run_status.write_status(tmp_path, "complete", 3, 0)
    assert launcher.status() == {}
    launcher.start_time -= 120
    assert launcher.status()["exit_code"] == 0
    launcher.process.pid += 1
    assert launcher.status() == {}


SLOW_RANK_0 = """
import os, sys, time
if os.environ.get("LOCAL_RANK") == "0" and "train.py" in sys.orig_argv:
    time.sleep(3)
"""


def test_mistyped_flag_on_two_processes(tmp_path):
    """One line, exit code 2, and no change to a run that trains in the folder. The rank that prints is the last to start."""
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "sitecustomize.py").write_text(SLOW_RANK_0)
    run_status.write_status(folder, "running", 3)
    words = make_train("NPROC=2", f"OUT={folder}", "ARGS=--max_step 5")
    done = run(words, env={"PYTHONPATH": str(tmp_path)})
    [line] = [line for line in done.stderr.splitlines() if line and not line.startswith("make")]
    assert "--max_step: " in line
    assert "max_steps?" in line
    assert "Error 2" in done.stderr
    assert run_status.read_status(folder)["status"] == "running"


@pytest.mark.parametrize(
    "codes, first, named",
    [({0: 2, 1: -15}, 0, []), ({0: -15, 1: -9}, 1, [1]), ({0: -15, 1: -15}, 0, [0]), ({0: 1, 1: -11}, 0, [1])],
)
def test_ranks_that_torchrun_ended_are_not_named(capsys, codes, first, named):
    quiet_launcher.report_killed(codes, first)
    assert [int(rank) for rank in re.findall(r"rank (\d+)", capsys.readouterr().err)] == named


def test_killed_process_is_named(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os\nprint(os.environ['OMP_NUM_THREADS'], flush=True)\nos.kill(os.getpid(), 9)\n")
    done = run(launch_command(script))
    assert done.returncode == 137
    [line] = done.stderr.splitlines()  # no warning about threads, no traceback
    assert "rank 0 was ended by SIGKILL" in line
    assert done.stdout.splitlines()[1] == str(psutil.cpu_count(logical=False))
