"""The files of slurm/ on a real Slurm of some nodes on this machine: time limits and preemption leave no trace in a run."""

import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from src.checkpointing import checkpoint_list
from src.runtime import run_status
from src.storage import atomic_folder
from tests.helpers import kill_storm as storm
from tests.helpers import kit
from tests.helpers.local_slurm import Slurm, missing

pytestmark = pytest.mark.cluster
SCRIPTS = sorted((kit.REPOSITORY / "slurm").glob("*.sbatch"))
STEPS = 40
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
# Says how it was called, or does what the test has put into the run folder.
ACCELERATE = f"""#!{sys.executable} -IS
import os, signal, sys, time
OUT, ENV = os.environ["OUT"], os.environ

def told(code, step=1):
    os.makedirs(f"{{OUT}}/checkpoints/step_{{step:08d}}", exist_ok=True)
    with open(f"{{OUT}}/status.json", "w") as file:
        file.write('{{"status": "as told", "step": %d, "exit_code": %d, "reason": ""}}' % (step, code))
    sys.exit(min(code, 1))

if os.path.exists(f"{{OUT}}/does"):
    exec(open(f"{{OUT}}/does").read())
else:
    print("node", ENV["SLURM_NODEID"], "of", ENV["HEAD"], *sys.argv[1:])
"""
WAITS = """
if "SLURM_RESTART_COUNT" in ENV:
    told(0)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: told(75))
print("waiting", flush=True)
time.sleep(120)
"""
LISTENS, FORGETS, INSISTS = 'trap "" TERM USR1', "((code != 75)) || again", "[[ $told != TERM ]] || return 0"


def project(folder: Path, out=lambda text: text) -> Path:
    """Make a folder to submit from: this project, with `out` done to the text of its slurm files, and no .venv."""
    folder.mkdir(parents=True)
    for name in ("train.py", "src", "accelerate_configs"):
        (folder / name).symlink_to(kit.REPOSITORY / name)
    (folder / "slurm").mkdir()
    for script in SCRIPTS:
        (folder / "slurm" / script.name).write_text(out(script.read_text()))
    kit.write_yaml(folder / "x.yaml", {})
    return folder


def without(text: str):
    """Return what makes a mutant of the slurm files: one that lacks `text`."""

    def out(script: str) -> str:
        assert text in script or "train.sbatch: $*" not in script
        return script.replace(text, ":")

    return out


class Job:
    """One job, submitted from a folder; with `fake`, its launcher does that instead (or says how it was called)."""

    def __init__(self, slurm: Slurm, folder: Path, *command, fake: str | None = None, task: int | None = None, **env):
        self.slurm, self.output, self.at = slurm, folder / "output.txt", 0
        out = folder / "run"
        self.folder = folder / f"run_seed{task}" if task is not None else out
        path = f"{Path(sys.executable).parent}:{slurm.env['PATH']}"
        if fake is not None:
            (folder / "bin").mkdir(exist_ok=True)
            (folder / "bin" / "accelerate").write_text(ACCELERATE)
            (folder / "bin" / "accelerate").chmod(0o755)
            path = f"{folder / 'bin'}:{path}"
        if fake:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "does").write_text(fake)
        self.id = slurm(
            *["sbatch", "--parsable", "--output", self.output, *command],
            env={"PATH": path, "OUT": str(out)} | env,
            cwd=folder,
        ) + (f"_{task}" if task is not None else "")

    def about(self) -> dict[str, str]:
        return self.slurm.job(self.id)

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def state(self) -> tuple[str, int, str]:
        """Return its state, how often it was put back into the queue, and its exit code."""
        about = self.about()
        return about["JobState"], int(about["Restarts"]), about["ExitCode"].split(":")[0]

    def until(self, true, timeout: float = 120) -> None:
        """Return when `true` is, or the job has ended; asks Slurm rarely, for that costs the jobs beside it their time."""
        kit.until(lambda: true() or (time.sleep(0.3) or self.state()[0] in ENDED), timeout)

    def end(self, timeout: float = 120) -> tuple[str, int, str]:
        """Return its state when it has ended for good."""
        self.until(lambda: False, timeout)
        return self.state()

    def trained(self, steps: int, timeout: float = 120) -> int:
        """Return the step at which it is as soon as that is so many."""
        kit.until(
            lambda: kit.last_step(self.folder) >= steps or "exit code" in self.text().split("start ")[-1], timeout
        )
        assert kit.last_step(self.folder) >= steps, self.text()
        return kit.last_step(self.folder)

    def went_on(self, restarts: int, step: int, timeout: float = 60) -> bool:
        """Return whether it was started again, for the so-manieth time, after it had ended in order with all saved up to `step`."""
        starts = lambda: re.split(r"start \d+: .*\n", self.text())[1:]  # noqa: E731
        self.until(lambda: len(starts()) > restarts, timeout)
        if len(starts()) != restarts + 1 or f"{self.folder}: stopped, step" not in starts()[restarts - 1]:
            return False
        newest = checkpoint_list.newest_intact(self.folder)
        return not atomic_folder.verify(newest) and checkpoint_list.step_of(newest) >= step


# ---- what needs no Slurm -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_each_file_is_sound_and_says_in_its_first_lines_how_it_is_submitted(script):
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", script], check=False).returncode == 0
    text = script.read_text()
    assert re.search(rf"^# +sbatch .*slurm/{script.name}", "\n".join(text.splitlines()[:5]), re.MULTILINE)
    assert "set -euo pipefail" in text
    assert {"--requeue", "--open-mode=append", "--signal=B:USR1@180"} <= set(re.findall(r"^#SBATCH (\S+)", text, re.M))


# ---- a Slurm whose launcher only says how it was called, or does as it is told ----------------------------------------------


@pytest.fixture(scope="module")
def slurm():
    if fault := missing():
        pytest.skip(fault)
    with Slurm(nodes=4) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict:
    return kit.tiny_files(tmp_path_factory.mktemp("tiny"))


def recipe(tiny, **fields) -> list[str]:
    """Only a stop saves; the whole takes long enough for signals to come before its end."""
    values = {"global_batch_size": 160, "per_device_batch_size": 1, "per_device_eval_batch_size": 4, "max_steps": STEPS}
    values |= {"learning_rate": 3e-3, "logging_steps": 1, "eval_steps": 15, "save_steps": 10_000}
    return kit.flags(**tiny | values | fields)


@pytest.fixture(scope="module")
def jobs(slurm, tiny, tmp_path_factory) -> dict[str, Job]:
    """All that takes its time, side by side: three real runs, each told to end while it trains, and jobs of fakes."""
    folder, train, x = tmp_path_factory.mktemp("jobs"), "slurm/train.sbatch", "x.yaml"
    here, endless = {"MAIN_PROCESS_IP": "127.0.0.1"}, recipe(tiny, max_steps=10_000)
    two = Job(slurm, project(folder / "two"), "-w", "n1,n2", train, x, *recipe(tiny), **here)
    listens = project(folder / "listens", without(LISTENS))
    long = recipe(tiny, max_steps=10_000, global_batch_size=1600)  # or a step might end before its launcher does
    listens = Job(slurm, listens, "-w", "n3", train, x, *long, NPROC_PER_NODE="2")
    seed = project(folder / "seed")
    seed = Job(slurm, seed, "-w", "n3", "--array", "7", "slurm/array.sbatch", x, *endless, task=7)
    started = {"two nodes": two, "launchers that listen": listens, "seed": seed}
    for name, out in (("clock", str), ("clock forgotten", without(FORGETS))):
        started[name] = Job(slurm, project(folder / name, out), "-w", "n4", "--time", "1", train, x, fake=WAITS)
    started["grace"] = Job(slurm, project(folder / "grace"), "-w", "n4", train, x, fake=WAITS)
    kit.until(lambda: "waiting" in started["grace"].text())
    slurm("scancel", "--signal=TERM", started["grace"].id)
    started["stuck"] = Job(slurm, project(folder / "stuck"), "-w", "n4", train, x, fake="told(75)")
    limit = ["--batch", "--signal=USR1"]
    for job, steps, how in ((two, 3, limit), (seed, 3, []), (listens, 1, limit)):
        job.at = job.trained(steps)
        slurm("scancel", *how, job.id)
    return started


def test_mutant_launchers_that_listen_to_the_signal_are_caught(slurm, jobs):
    job = jobs["launchers that listen"]
    went_on = job.went_on(1, job.at)
    slurm("scancel", "--full", "--signal=KILL", job.id, check=False)
    slurm("scancel", job.id)
    assert not went_on, job.text()
    assert "User defined signal 1" in job.text()


def test_a_run_on_two_nodes_survives_a_time_limit_and_a_preemption(slurm, jobs, tiny, tmp_path):
    """First the signal that Slurm sends before the limit, then a job of a partition that may take the nodes away."""
    job = jobs["two nodes"]
    assert job.went_on(1, job.at), job.text()
    first = job.at
    job.at = job.trained(first + 3)
    slurm("sbatch", "-p", "urgent", "-w", "n1,n2", "--exclusive", "--output", "/dev/null", "--wrap", "true")
    straight = kit.run_training(2, tmp_path / "straight", *recipe(tiny))  # while the job ends, waits and starts
    assert job.went_on(2, job.at), job.text()
    assert 0 < first < job.at < STEPS
    assert job.end() == ("COMPLETED", 2, "0"), job.text()
    assert storm.differences(straight.folder, job.folder) == []
    assert kit.Run(job.folder).losses() == straight.losses()
    assert len(set(re.findall(r"Resuming from step [\d,]+ \(\S*/(step_\d+)", job.text()))) == 2
    assert (job.folder / "logs" / "node_1.log").read_text()


def test_a_seed_that_is_cancelled_is_saved_and_not_put_back(jobs):
    job = jobs["seed"]
    assert job.end() == ("CANCELLED", 0, "75"), job.text()
    kit.until(lambda: run_status.read_status(job.folder).get("status") == "stopped")
    newest = checkpoint_list.newest_intact(job.folder)
    assert not atomic_folder.verify(newest)
    assert checkpoint_list.step_of(newest) >= job.at >= 3
    assert "seed: 7" in (job.folder / "config.yaml").read_text()


def test_the_clock_of_slurm_puts_a_job_back_in_time(jobs):
    assert jobs["clock"].end() == ("COMPLETED", 1, "0"), jobs["clock"].text()


def test_mutant_without_requeue_is_caught(jobs):
    assert jobs["clock forgotten"].end() == ("FAILED", 0, "75"), jobs["clock forgotten"].text()


def test_a_job_that_is_preempted_with_grace_is_put_back(jobs):
    """Slurm then tells the steps alone, and takes a job that ends in time for one that is done with."""
    assert jobs["grace"].end() == ("COMPLETED", 1, "0"), jobs["grace"].text()


def test_a_job_that_comes_no_further_is_not_put_back_for_ever(jobs):
    job = jobs["stuck"]
    assert job.end() == ("FAILED", 1, "75"), job.text()
    assert "not put back into the queue; give the job more time" in job.text()


@pytest.mark.parametrize("fake, code", [("sys.exit(3)", 1), ("told(1)", 1), ("told(2)", 2), ("told(0)", 0)])
def test_only_a_run_that_was_stopped_is_put_back(slurm, tmp_path, fake, code):
    """A launcher that fails without a word from the run; a run that fails; one that the user has to mend; a whole one."""
    job = Job(slurm, project(tmp_path / "p"), "slurm/train.sbatch", "x.yaml", fake=fake)
    if fake == "sys.exit(3)":
        code = 3
    assert job.end(30) == ("FAILED" if code else "COMPLETED", 0, str(code)), job.text()


def cancelled(slurm, folder: Path, out) -> tuple[str, int, str]:
    job = Job(slurm, project(folder, out), "slurm/train.sbatch", "x.yaml", fake=WAITS)
    kit.until(lambda: "waiting" in job.text())
    slurm("scancel", job.id)
    kit.until(lambda: "as told" in job.text(), 30)
    time.sleep(0.5)
    return job.state()


def test_a_job_that_is_cancelled_stays_so(slurm, tmp_path):
    assert cancelled(slurm, tmp_path / "p", str) == ("CANCELLED", 0, "75")


def test_mutant_putting_back_what_was_cancelled_is_caught(slurm, tmp_path):
    assert cancelled(slurm, tmp_path / "p", without(INSISTS)) != ("CANCELLED", 0, "75")


def port_of(job: Job) -> int:
    return int(re.search(r"--main_process_port (\d+)", job.text())[1])


def test_a_port_on_which_somebody_listens_is_left_alone(slurm, tmp_path):
    words = ["-N", "2", "slurm/train.sbatch", "x.yaml"]
    one = Job(slurm, project(tmp_path / "one"), *words, fake="", MAIN_PROCESS_IP="127.0.0.1")
    one.end(30)
    with ExitStack() as stack:
        taken = [20_000 + (int(one.id) + more) % 10_000 for more in (1, 2)]
        for port in taken:
            with suppress(OSError):  # already so
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        two = Job(slurm, project(tmp_path / "two"), *words, fake="", MAIN_PROCESS_IP="127.0.0.1")
        two.end(30)
    assert int(two.id) == int(one.id) + 1
    assert port_of(two) > max(taken)


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_launchers_are_told_what_belongs_together(slurm, tmp_path, nodes):
    where = {"MAIN_PROCESS_IP": "127.0.0.1", "NPROC_PER_NODE": "2"}
    words = ["-N", nodes, "slurm/train.sbatch", "x.yaml", "--learning_rate", "1e-3"]
    job = Job(slurm, project(tmp_path / "p"), *words, fake="", **where)
    assert job.end(30) == ("COMPLETED", 0, "0"), job.text()
    place = f" --main_process_ip 127.0.0.1 --main_process_port {port_of(job)}" if nodes > 1 else ""
    lines = sorted(line for line in job.text().splitlines() if line.startswith("node "))
    assert lines == [
        f"node {rank} of {'127.0.0.1' if nodes > 1 else ''} launch --machine_rank {rank} --quiet --config_file "
        f"accelerate_configs/cpu_ddp.yaml --num_machines {nodes} --num_processes {2 * nodes}{place} train.py --config x.yaml "
        f"--output_dir {job.folder} --learning_rate 1e-3"
        for rank in range(nodes)
    ]
    logs = [(job.folder / "logs" / f"node_{rank}.log").read_text().strip() for rank in range(nodes)]
    assert logs == lines


@pytest.mark.parametrize("nodes, gpus, where", [(1, 1, "gpu"), (1, 8, "ddp"), (2, 1, "ddp")])
def test_a_job_with_gpus_has_a_process_for_each(slurm, tmp_path, nodes, gpus, where):
    words = ["-N", nodes, "slurm/train.sbatch", "x.yaml"]
    here = {"MAIN_PROCESS_IP": "127.0.0.1", "SLURM_GPUS_ON_NODE": str(gpus)}
    job = Job(slurm, project(tmp_path / "p"), *words, fake="", **here)
    assert job.end(30) == ("COMPLETED", 0, "0"), job.text()
    assert f"accelerate_configs/{where}.yaml --num_machines {nodes} --num_processes {nodes * gpus} " in job.text()


def test_each_task_of_an_array_has_its_seed_and_its_folder(slurm, tmp_path):
    folder = project(tmp_path / "p")
    job = Job(slurm, folder, "--array", "3,5", "slurm/array.sbatch", "x.yaml", "--max_steps", "9", fake="")
    lines = lambda: sorted(line for line in job.text().splitlines() if line.startswith("node "))  # noqa: E731
    kit.until(lambda: len(lines()) == 2, 30)
    for line, seed in zip(lines(), (3, 5), strict=True):
        assert "--num_machines 1 --num_processes 1 train.py" in line
        assert line.endswith(f"--output_dir {job.folder}_seed{seed} --max_steps 9 --seed {seed}")
        assert (folder / f"run_seed{seed}" / "logs").is_dir()


def test_a_head_node_that_cannot_be_found_ends_the_job_at_once(slurm, tmp_path):
    """The names of the nodes here are unknown outside Slurm: no launcher is started, least of all one that meets itself."""
    job = Job(slurm, project(tmp_path / "p"), "-N", "2", "slurm/train.sbatch", "x.yaml", fake="")
    began = time.monotonic()
    assert job.end(30) == ("FAILED", 0, "2"), job.text()
    assert time.monotonic() - began < 10
    assert "cannot resolve the head node n" in job.text()
    assert "machine_rank" not in job.text()


def test_mutant_meeting_on_localhost_is_caught(slurm, tmp_path):
    folder = project(tmp_path / "p", lambda text: text.replace("HEAD=${HEAD%%", "HEAD=localhost; : ${HEAD%%"))
    job = Job(slurm, folder, "-N", "2", "slurm/train.sbatch", "x.yaml", fake="")
    assert job.end(30) != ("FAILED", 0, "2"), job.text()


def test_the_run_folder_is_named_as_make_train_names_it(slurm, tmp_path):
    """A second job of the same command goes on where the first one was."""
    folder = project(tmp_path / "p")
    Job(slurm, folder, "slurm/train.sbatch", "x.yaml", fake="", OUT="").end(30)
    Job(slurm, folder, "slurm/train.sbatch", "x.yaml", fake="", OUT="", NPROC_PER_NODE="3").end(30)
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["x", "x_3proc"]


@pytest.mark.parametrize(
    "script, words, message",
    [
        ("train", [], "give a run file"),
        ("train", ["nowhere.yaml"], "no nowhere.yaml in"),
        ("train", ["x.yaml", "--output_dir", "a"], "the run folder is given by the environment"),
        ("train", ["x.yaml", "--output_dir=a"], "the run folder is given by the environment"),
        ("array", ["--max_steps", "3"], "give a run file"),
        ("array", ["x.yaml", "--seed", "3"], "the seed of each run is its number in the array"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(tmp_path, script, words, message):
    folder = project(tmp_path / "p")
    command = ["bash", f"slurm/{script}.sbatch", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (folder / "runs").exists()
