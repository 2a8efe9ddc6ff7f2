"""The files of cluster/slurm/ on a real Slurm of three nodes on this machine: time limits, preemption, arguments of the launchers."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engine.distributed.local_slurm import Slurm, missing
from tests.helpers import kill_storm, kit

pytestmark = pytest.mark.cluster
SCRIPTS = sorted((kit.REPOSITORY / "cluster" / "slurm").glob("*.sbatch"))
STEPS = 40
LOOPBACK = {"MAIN_PROCESS_IP": "127.0.0.1"}  # the node names are unknown outside Slurm
REQUEUE = "((code != 75)) || requeue"  # a part of train.sbatch that the mutant lacks
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

# A fake `accelerate`: runs the code in the variable FAKE.
FAKE_ACCELERATE = f"""#!{sys.executable} -IS
import os, signal, sys, time
ENV = os.environ

def end(code):
    os.makedirs(ENV["OUT"] + "/checkpoints/step_00000001", exist_ok=True)
    with open(ENV["OUT"] + "/status.json", "w") as file:
        file.write('{{"status": "fake run", "step": 1, "exit_code": %d, "reason": ""}}' % code)
    sys.exit(min(code, 1))

exec(ENV["FAKE"])
"""
PRINT_ARGUMENTS = 'print("node", ENV["SLURM_NODEID"], "of", ENV["HEAD"], *sys.argv[1:])'
# Waits for a signal and ends as a stopped run; completes after a requeue.
WAIT_FOR_SIGNAL = """
if "SLURM_RESTART_COUNT" in ENV:
    end(0)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: end(75))
print("waiting", flush=True)
time.sleep(600)
"""


def make_project(folder: Path) -> Path:
    """Return a folder to submit from: this project without .venv."""
    folder.mkdir(parents=True)
    for name in ("train.py", "engine", "src", "accelerate_configs"):
        (folder / name).symlink_to(kit.REPOSITORY / name)
    shutil.copytree(kit.REPOSITORY / "cluster" / "slurm", folder / "cluster" / "slurm")
    kit.write_yaml(folder / "x.yaml", {})
    return folder


class Job:
    """A job, submitted from a folder; `fake` is the code of a fake launcher."""

    def __init__(self, slurm: Slurm, folder: Path, *command, fake: str = "", **env):
        self.slurm, self.output = slurm, folder / "output.txt"
        self.folder = folder / "run"
        path = f"{Path(sys.executable).parent}:{slurm.env['PATH']}"
        if fake:
            (folder / "bin").mkdir()
            (folder / "bin" / "accelerate").write_text(FAKE_ACCELERATE)
            (folder / "bin" / "accelerate").chmod(0o755)
            path = f"{folder / 'bin'}:{path}"
        env |= {"PATH": path, "OUT": str(self.folder), "FAKE": fake}
        self.id = slurm("sbatch", "--parsable", "--output", self.output, *command, env=env, cwd=folder)

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def state(self) -> tuple[str, int, str]:
        """Return (state, requeues, exit code)."""
        words = self.slurm("scontrol", "--oneliner", "show", "job", self.id).split()
        job = dict(word.split("=", 1) for word in words if "=" in word)
        return job["JobState"], int(job["Restarts"]), job["ExitCode"].split(":")[0]

    def end(self, condition=lambda: False) -> tuple[str, int, str]:
        """Return the state when `condition` is true or the job has ended; asks rarely, because that slows the other jobs."""
        kit.until(lambda: condition() or (time.sleep(0.3) or self.state()[0] in ENDED))
        return self.state()

    def until_step(self, step: int) -> int:
        """Return the step of the run when it has reached `step`."""
        self.end(lambda: kit.last_step(self.folder) >= step)
        assert kit.last_step(self.folder) >= step, self.text()
        return kit.last_step(self.folder)


@pytest.fixture(scope="module")
def slurm():
    if reason := missing():
        pytest.skip(reason)
    with Slurm(nodes=3) as slurm:
        yield slurm


# ---- without Slurm -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script_header(script):
    text = script.read_text()
    assert "set -euo pipefail" in text
    assert {"--requeue", "--open-mode=append", "--signal=B:USR1@180"} <= set(re.findall(r"^#SBATCH (\S+)", text, re.M))


@pytest.mark.parametrize(
    "script, words, name",
    [
        ("train", [], "run file"),
        ("train", ["x.yaml", "--output_dir", "a"], "OUT="),
        ("array", ["x.yaml", "--seed", "3"], "--seed"),
    ],
)
def test_invalid_arguments(tmp_path, script, words, name):
    folder = make_project(tmp_path / "p")
    command = ["bash", f"cluster/slurm/{script}.sbatch", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert name in done.stderr
    assert not (folder / "runs").exists()


def test_folder_to_submit_from_has_what_a_job_runs(tmp_path):
    command = [sys.executable, "-m", "engine.process.run_status", "run", "75"]
    done = subprocess.run(command, cwd=make_project(tmp_path / "p"), capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("75\n", 0), done.stderr


# ---- stopped and requeued ----------------------------------------------------------------------------------------------


def recipe(tiny, **fields) -> list[str]:
    """Only a stop saves; the run takes long enough that no signal misses it."""
    values = {"global_batch_size": 160, "per_device_batch_size": 1, "per_device_eval_batch_size": 4, "max_steps": STEPS}
    values |= {"learning_rate": 3e-3, "logging_steps": 1, "eval_steps": 15, "save_steps": 10_000}
    return kit.flags(**tiny | values | fields)


@pytest.fixture(scope="module")
def jobs(slurm, tiny, tmp_path_factory) -> dict[str, Job]:
    """All slow jobs side by side: a real run, signaled while it trains, and fake runs."""
    base, train = tmp_path_factory.mktemp("jobs"), ["cluster/slurm/train.sbatch", "x.yaml"]
    jobs = {}
    two_nodes = [*train, *recipe(tiny)]
    jobs["two nodes"] = Job(slurm, make_project(base / "two"), "-w", "n1,n2", *two_nodes, **LOOPBACK)
    for name, code in (("time limit", REQUEUE), ("time limit, mutant", ":")):
        script = make_project(base / name) / "cluster" / "slurm" / "train.sbatch"
        script.write_text(script.read_text().replace(REQUEUE, code))
        jobs[name] = Job(slurm, base / name, "-w", "n3", "--time", "1", *train, fake=WAIT_FOR_SIGNAL)
    jobs["grace"] = Job(slurm, make_project(base / "grace"), "-w", "n3", *train, fake=WAIT_FOR_SIGNAL)
    kit.until(lambda: "waiting" in jobs["grace"].text())
    slurm("scancel", "--signal=TERM", jobs["grace"].id)
    for name, code in (("no progress", 75), ("failed", 1)):
        jobs[name] = Job(slurm, make_project(base / name), "-w", "n3", *train, fake=f"end({code})")
    jobs["two nodes"].until_step(3)
    slurm("scancel", "--batch", "--signal=USR1", jobs["two nodes"].id)
    return jobs


def test_two_nodes_with_time_limit_and_preemption(slurm, jobs, tiny, tmp_path):
    """First the signal before the time limit, then a job of a partition with a higher priority."""
    job = jobs["two nodes"]
    job.end(lambda: "start 2: " in job.text())
    step = job.until_step(kit.last_step(job.folder) + 3)
    slurm("sbatch", "-p", "urgent", "-w", "n1,n2", "--exclusive", "--output", "/dev/null", "--wrap", "true")
    undisturbed = kit.run_training(2, tmp_path / "straight", *recipe(tiny))  # while the job ends, waits and starts
    assert job.end() == ("COMPLETED", 2, "0"), job.text()
    assert kill_storm.differences(undisturbed.folder, job.folder) == []
    starts = json.loads((job.folder / "environment.json").read_text())["starts"]
    first, second, third = (start["step"] for start in starts)
    assert first == 0 < 3 <= second < step <= third < STEPS, job.text()
    assert job.text().count("stopped, step") >= 2
    assert (job.folder / "logs" / "node_1.log").read_text()


@pytest.mark.parametrize(
    "name, state",
    [
        ("time limit", ("COMPLETED", 1, "0")),
        ("time limit, mutant", ("FAILED", 0, "75")),
        ("grace", ("COMPLETED", 1, "0")),  # preempted with grace time: Slurm signals the steps only
        ("no progress", ("FAILED", 1, "75")),
        ("failed", ("FAILED", 0, "1")),
    ],
)
def test_requeue(jobs, name, state):
    assert jobs[name].end() == state, jobs[name].text()


def test_cancelled_job_is_not_requeued(slurm, tmp_path):
    job = Job(slurm, make_project(tmp_path / "p"), "cluster/slurm/train.sbatch", "x.yaml", fake=WAIT_FOR_SIGNAL)
    kit.until(lambda: "waiting" in job.text())
    slurm("scancel", job.id)
    kit.until(lambda: job.state() == ("CANCELLED", 0, "75"))


# ---- arguments of the launchers ----------------------------------------------------------------------------------------


def printed_arguments(job: Job) -> list[str]:
    return sorted(line for line in job.text().splitlines() if line.startswith("node "))


def test_two_nodes_of_four_gpus(slurm, tmp_path):
    words = ["-N", "2", "cluster/slurm/train.sbatch", "x.yaml", "--learning_rate", "1e-3"]
    job = Job(slurm, make_project(tmp_path / "p"), *words, fake=PRINT_ARGUMENTS, SLURM_GPUS_ON_NODE="4", **LOOPBACK)
    assert job.end() == ("COMPLETED", 0, "0"), job.text()
    port = re.search(r"--main_process_port (\d+)", job.text())[1]
    assert printed_arguments(job) == [
        f"node {rank} of 127.0.0.1 launch --machine_rank {rank} --quiet --config_file accelerate_configs/ddp.yaml "
        f"--num_machines 2 --num_processes 8 --main_process_ip 127.0.0.1 --main_process_port {port} train.py "
        f"--config x.yaml --output_dir {job.folder} --learning_rate 1e-3"
        for rank in range(2)
    ]


def test_node_script_finds_the_nodes_of_a_step(slurm):
    command = [kit.REPOSITORY / "cluster" / "node.sh", "--print", "configs/stdlib_lm.yaml"]
    words = ["srun", "--nodes", "2", "--ntasks-per-node", "1", *command]
    lines = sorted(slurm(*words, cwd=kit.REPOSITORY, env={"OUT": "x"}).splitlines())
    for rank, line in enumerate(lines):
        assert f"--num_processes 2 --num_machines 2 --machine_rank {rank} --main_process_ip n" in line
    assert len(lines) == 2


def test_array_task_has_its_seed_and_folder(slurm, tmp_path):
    folder, words = (
        make_project(tmp_path / "p"),
        ["--array", "3,5", "cluster/slurm/array.sbatch", "x.yaml", "--max_steps", "9"],
    )
    job = Job(slurm, folder, *words, fake=PRINT_ARGUMENTS, NPROC_PER_NODE="2")
    kit.until(lambda: len(printed_arguments(job)) == 2)
    for line, seed in zip(printed_arguments(job), (3, 5), strict=True):
        assert "accelerate_configs/cpu_ddp.yaml --num_machines 1 --num_processes 2 train.py" in line
        assert line.endswith(f"--output_dir {job.folder}_seed{seed} --max_steps 9 --seed {seed}")
        assert (folder / f"run_seed{seed}" / "logs").is_dir()


def test_unknown_head_node_ends_the_job_at_once(slurm, tmp_path):
    job = Job(
        slurm, make_project(tmp_path / "p"), "-N", "2", "cluster/slurm/train.sbatch", "x.yaml", fake=PRINT_ARGUMENTS
    )
    assert job.end() == ("FAILED", 0, "2"), job.text()
    assert "machine_rank" not in job.text()
    assert "cannot resolve the head node n" in job.text()
