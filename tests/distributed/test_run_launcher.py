"""What make starts: the folder of the run, threads, Ctrl-C on a terminal, exit codes; and what nobody else may print."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import psutil
import pytest

from src.checkpointing import checkpoint_list
from src.distributed import quiet_launcher as launcher
from src.distributed import run_launcher
from src.runtime import run_status
from tests.helpers import kit

PLAIN = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "OMP_"))}
FOREIGN = ("Traceback", "OMP_NUM_THREADS", "had defaults used", "torch.distributed", "CalledProcessError")


class Terminal:
    """A command on a terminal of its own, as a person has it."""

    def __init__(self, *words, folder=kit.REPOSITORY, env=None):
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(str(words[0]), [str(word) for word in words], PLAIN | (env or {}))
        self.text = ""

    def read(self, seconds: float) -> bool:
        """Take what is printed within this time; return whether the command may print more."""
        if select.select([self.file], [], [], seconds)[0]:
            try:
                new = os.read(self.file, 1 << 16).decode(errors="replace")
            except OSError:
                return False
            self.text += new.replace("\r\n", "\n")
            return bool(new)
        return True

    def until(self, true, timeout: float = 90):
        end = time.monotonic() + timeout
        while not true():
            assert self.read(0.05), self.text
            assert time.monotonic() < end, self.text

    def press(self, key: bytes) -> None:
        os.write(self.file, key)

    def ready(self) -> int:
        """Return the process of SCRIPT when it hears signals."""
        self.until(lambda: re.search(r"ready (\d+)\n", self.text))
        return int(re.search(r"ready (\d+)\n", self.text)[1])

    def lines(self, timeout: float = 60) -> list[str]:
        """Return the lines without those of make and the terminal's ^C, when the command has ended."""
        end = time.monotonic() + timeout
        while self.read(0.2):
            assert time.monotonic() < end, self.text
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        lines = [line.strip() for line in self.text.splitlines()]
        return [line for line in lines if line and not line.startswith("make") and line != "^C"]


@pytest.fixture
def endless(tmp_path) -> Path:
    """A run file for more steps than anybody waits for, which names its own folder."""
    fields = {name: str(value) for name, value in kit.tiny_files(tmp_path).items()}
    fields |= {"global_batch_size": 8, "per_device_batch_size": 2, "max_steps": 10**6, "logging_steps": 1}
    return kit.write_yaml(tmp_path / "run.yaml", fields | {"output_dir": str(tmp_path / "own")})


def make_train(run_file: Path, *words) -> list:
    return ["make", "-o", ".venv/done", "train", f"CONFIG={run_file}", *words]


# ---- the folder of the run ----------------------------------------------------------------------------------------------


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
def test_the_folder_of_a_run(tmp_path, yaml, flags, folder):
    path = kit.write_yaml(tmp_path / "run.yaml", {"seed": 1} | yaml)
    words = ["--config_file", "x.yaml", "train.py", "--config", str(path), *flags]
    found, added = run_launcher.find_run_folder("default", words)
    assert found == Path(folder)
    assert added == words + ["--output_dir", "default"] * (folder == "default")


def test_threads_are_the_cores_of_a_process():
    where = {name: str(kit.REPOSITORY / "accelerate_configs" / f"{name}.yaml") for name in ("cpu", "cpu_ddp", "ddp")}
    cores = psutil.cpu_count(logical=False)

    def threads(name, processes=None):
        given = {"config_file": where[name], "num_processes": processes, "num_machines": None, "cpu": False}
        return launcher.threads_per_process(Namespace(**given))

    assert threads("cpu") == cores  # what accelerate gives one process
    assert threads("cpu_ddp") == max(1, cores // 2)  # of the file
    assert threads("cpu_ddp", processes=cores) == 1
    assert threads("cpu_ddp", processes=10 * cores) == 1
    assert threads("ddp", processes=1) == 1  # GPUs compute


# ---- Ctrl-C -------------------------------------------------------------------------------------------------------------


def test_ctrl_c_under_make_on_two_processes(endless, tmp_path):
    """The flag's folder with a space is where the status is looked for; nothing foreign is printed before or after."""
    folder = tmp_path / "a run"
    run = Terminal(*make_train(endless, "NPROC=2", f"ARGS=--output_dir '{folder}'"))
    run.until(lambda: kit.last_step(folder) > 3)
    run.press(b"\x03")
    lines = run.lines()
    step = checkpoint_list.step_of(checkpoint_list.newest_intact(folder))
    assert step == kit.last_step(folder)
    assert lines[-1] == f"Stopped by Ctrl-C at step {step}. Saved to {folder}; run the same command to resume."
    assert lines[0].startswith("accelerate launch ")
    assert not [name for name in FOREIGN if name in run.text]
    assert "Error 75" in run.text
    assert not (tmp_path / "own").exists()
    share = max(1, psutil.cpu_count(logical=False) // 2)
    assert f"{share} thread{'s' * (share > 1)} per rank" in (folder / "environment.json").read_text()


@pytest.mark.parametrize("how", ["make", "python"])
def test_ctrl_c_before_training_begins(endless, tmp_path, how):
    """While the launcher, or train.py, imports."""
    words = make_train(endless) if how == "make" else [sys.executable, "train.py", "--config", endless]
    run, began = Terminal(*words), time.monotonic()
    run.until(lambda: "accelerate launch" in run.text if how == "make" else time.monotonic() > began + 1)
    run.press(b"\x03")
    lines = run.lines()
    assert "Stopped by Ctrl-C before training began" in lines[-1]
    assert "Traceback" not in run.text
    assert not (tmp_path / "own").exists()


SCRIPT = """
import os, signal, sys, time
got = []
def hear(number, _):
    got.append(number)
    print("got", signal.Signals(number).name, flush=True)
    if len(got) == 2:
        os._exit(1)
signal.signal(signal.SIGINT, hear)
signal.signal(signal.SIGTERM, hear)
print("ready", os.getpid(), flush=True)
for i in range(600):
    time.sleep(0.1)
    print("beat", flush=True)
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def attended(script: Path, *before: str) -> list:
    """Return a command that launches `script` for a run in a folder beside it."""
    where = kit.REPOSITORY / "accelerate_configs" / "cpu.yaml"
    return [
        *before,
        sys.executable,
        "-m",
        "src.distributed.run_launcher",
        script.parent / "run",
        "--",
        "--config_file",
        where,
        script,
    ]


def test_a_second_ctrl_c_is_passed_on(script):
    run = Terminal(*attended(script))
    run.ready()
    for count in (1, 2):
        run.press(b"\x03")
        run.until(lambda count=count: run.text.count("got SIGINT") == count)
    run.lines()
    assert run.code == 130
    assert "Traceback" not in run.text


ENDED = """
import os, sys, threading, time
from pathlib import Path
from src.runtime import run_status as status
status.write_status(Path(sys.argv[-1]), "stopped", 3, 75)
print("Saved", flush=True)
"""


def test_ctrl_c_after_the_run_has_ended(script, tmp_path, monkeypatch):
    """The training process is gone and has said that it saved; its launcher is about to end."""
    script.write_text(ENDED)
    (tmp_path / "run").mkdir()
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys, time\n"
        "if 'src.distributed.quiet_launcher' in ' '.join(sys.orig_argv):\n    atexit.register(time.sleep, 20)\n"
    )
    path = f"{kit.REPOSITORY}:{tmp_path}"
    run = Terminal(*attended(script), env={"PYTHONPATH": path})
    run.until(lambda: "Saved" in run.text)
    launcher = psutil.Process(run.pid).children()[0]
    run.until(lambda: not launcher.children() or time.sleep(0.1))
    run.press(b"\x03")
    lines = run.lines()
    assert lines[-1] == "Saved"
    assert run.code == 75


def test_a_terminal_that_is_closed_stops_the_run(script, tmp_path):
    """Its SIGHUP becomes SIGTERM for the training process, which SIGHUP would end unsaved."""
    script.write_text(
        SCRIPT.replace('print("got"', f'open(r"{tmp_path}/got", "a").write(signal.Signals(number).name)  #')
    )
    run = Terminal(*attended(script))
    worker = run.ready()
    os.close(run.file)
    kit.until(lambda: (tmp_path / "got").exists() and (tmp_path / "got").read_text(), 20)
    assert (tmp_path / "got").read_text() == "SIGTERM"
    os.kill(worker, 9)
    os.waitpid(run.pid, 0)


def test_ctrl_z_pauses_the_run_and_fg_continues_it(script):
    run = Terminal(*attended(script))
    worker = psutil.Process(run.ready())
    os.kill(run.pid, 20)
    kit.until(lambda: worker.status() == psutil.STATUS_STOPPED, 10)
    os.kill(run.pid, 18)
    kit.until(lambda: worker.status() != psutil.STATUS_STOPPED, 10)
    run.press(b"\x03")
    run.until(lambda: "got SIGINT" in run.text)
    worker.kill()
    run.lines()


def test_nohup_is_respected(script, tmp_path):
    output = (tmp_path / "output.txt").open("w+")
    run = subprocess.Popen(
        [str(word) for word in attended(script, "nohup")], cwd=kit.REPOSITORY, env=PLAIN, stdout=output, stderr=output
    )
    kit.until(lambda: "ready" in (tmp_path / "output.txt").read_text())
    run.send_signal(1)
    time.sleep(2)
    assert "got" not in (tmp_path / "output.txt").read_text()
    run.send_signal(15)
    kit.until(lambda: "got" in (tmp_path / "output.txt").read_text())
    run.send_signal(15)
    assert run.wait(30) == 128 + 15
    text = (tmp_path / "output.txt").read_text()
    assert re.findall("got (.*)", text) == ["SIGTERM", "SIGTERM"]


# ---- exit codes -----------------------------------------------------------------------------------------------------------


def test_exit_codes(tmp_path):
    assert run_launcher.exit_code(0, [], True, None) == 0
    assert run_launcher.exit_code(2, [], True, None) == 2
    assert run_launcher.exit_code(1, [15], True, None) == 75  # before there was a status
    assert run_launcher.exit_code(1, [2, 2], True, None) == 130
    assert run_launcher.exit_code(1, [2], False, None) == 130  # an evaluation saves nothing
    assert run_launcher.exit_code(1, [15], True, 75) == 75
    assert run_launcher.exit_code(1, [], True, 75) == 75


def test_only_the_status_of_this_launch_counts(tmp_path):
    """Not that of a run before, whose launcher had the same number (containers begin at 1), nor of one that still trains,
    which keeps its status.json."""
    launched = run_launcher.Launcher.__new__(run_launcher.Launcher)
    launched.folder, launched.process, launched.start_time = tmp_path, Namespace(pid=os.getppid()), time.time() + 60
    run_status.write_status(tmp_path, "complete", 3, 0)
    assert launched.status() == {}
    launched.start_time -= 120
    assert launched.status()["exit_code"] == 0
    launched.process.pid += 1
    assert launched.status() == {}


def test_a_mistake_does_not_touch_the_run_that_is_there(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    run_status.write_status(folder, "running", 3)
    words = ["make", "-s", "-o", ".venv/done", "train", f"OUT={folder}", "ARGS=--max_step 5"]
    done = subprocess.run(words, cwd=kit.REPOSITORY, env=PLAIN, capture_output=True, text=True, timeout=90, check=False)
    assert "Error 2" in done.stderr
    assert run_status.read_status(folder)["status"] == "running"


def test_mistyped_flag_on_two_processes(tmp_path):
    words = ["make", "-s", "-o", ".venv/done", "train", "NPROC=2", f"OUT={tmp_path / 'run'}", "ARGS=--max_step 5"]
    done = subprocess.run(words, cwd=kit.REPOSITORY, env=PLAIN, capture_output=True, text=True, timeout=90, check=False)
    [line] = [line for line in done.stderr.splitlines() if line and not line.startswith("make")]
    assert "--max_step: " in line
    assert "max_steps?" in line
    assert "Error 2" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_process_that_was_killed_is_named(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os\nprint(os.environ['OMP_NUM_THREADS'], flush=True)\nos.kill(os.getpid(), 9)\n")
    words = [str(word) for word in attended(script)]
    done = subprocess.run(words, cwd=kit.REPOSITORY, env=PLAIN, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 137
    [line] = done.stderr.splitlines()  # no warning about threads, no traceback
    assert "rank 0 was ended by SIGKILL" in line
    assert done.stdout.splitlines()[1] == str(psutil.cpu_count(logical=False))
