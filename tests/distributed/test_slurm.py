"""The files of slurm/ on a real Slurm of four nodes on this machine: time limits, preemption, arguments of the launchers."""

import json
import re
import shutil
import socket
import subprocess
from contextlib import ExitStack, suppress

import pytest

from src.checkpointing.checkpoint_list import newest_intact, step_of
from src.runtime import run_status
from src.storage import atomic_folder
from tests.helpers import kill_storm, kit
from tests.helpers.local_slurm import Slurm, missing
from tests.helpers.slurm_jobs import SCRIPTS, WAIT_FOR_SIGNAL, Job, make_project

pytestmark = pytest.mark.cluster
STEPS = 40
LOOPBACK = {"MAIN_PROCESS_IP": "127.0.0.1"}  # the node names are unknown outside Slurm
# Parts of train.sbatch that mutants lack.
IGNORE_SIGNALS, REQUEUE = 'trap "" TERM USR1', "((code != 75)) || requeue"
SIGNAL_BEFORE_LAUNCH = (
    "    ((${SLURM_RESTART_COUNT:-0})) || kill -USR1 $$\n    ((nodes == 1)) ||"  # into its first start
)
KEEP_CANCELLED = "[[ $received != TERM ]] || return 0"


@pytest.fixture(scope="module")
def slurm():
    if reason := missing():
        pytest.skip(reason)
    with Slurm(nodes=4) as slurm:
        yield slurm


# ---- without Slurm -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script_header(script):
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", script], check=False).returncode == 0
    text = script.read_text()
    assert re.search(rf"^# +sbatch .*slurm/{script.name}", "\n".join(text.splitlines()[:5]), re.MULTILINE)
    assert "set -euo pipefail" in text
    assert {"--requeue", "--open-mode=append", "--signal=B:USR1@180"} <= set(re.findall(r"^#SBATCH (\S+)", text, re.M))


@pytest.mark.parametrize(
    "script, words, name",
    [
        ("train", [], "run file"),
        ("train", ["nowhere.yaml"], "nowhere.yaml"),
        ("train", ["x.yaml", "--output_dir", "a"], "OUT="),
        ("train", ["x.yaml", "--output-dir=a"], "OUT="),
        ("array", ["--max_steps", "3"], "run file"),
        ("array", ["x.yaml", "--seed", "3"], "--seed"),
    ],
)
def test_invalid_arguments(tmp_path, script, words, name):
    folder = make_project(tmp_path / "p")
    command = ["bash", f"slurm/{script}.sbatch", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert name in done.stderr
    assert not (folder / "runs").exists()


# ---- stopped and requeued ----------------------------------------------------------------------------------------------


def recipe(tiny, **fields) -> list[str]:
    """Only a stop saves; the run takes long enough that no signal misses it."""
    values = {"global_batch_size": 160, "per_device_batch_size": 1, "per_device_eval_batch_size": 4, "max_steps": STEPS}
    values |= {"learning_rate": 3e-3, "logging_steps": 1, "eval_steps": 15, "save_steps": 10_000}
    return kit.flags(**tiny | values | fields)


@pytest.fixture(scope="module")
def jobs(slurm, tiny, tmp_path_factory) -> dict[str, Job]:
    """All slow jobs side by side: three real runs, each signaled while it trains, and fake runs."""
    base, train = tmp_path_factory.mktemp("jobs"), ["slurm/train.sbatch", "x.yaml"]
    jobs = {}
    two_nodes = [*train, *recipe(tiny)]
    jobs["two nodes"] = Job(slurm, make_project(base / "two"), "-w", "n1,n2", *two_nodes, **LOOPBACK)
    slow = [*train, *recipe(tiny, max_steps=10_000)]
    mutant = make_project(base / "mutant", remove=IGNORE_SIGNALS)
    jobs["launcher with signals"] = Job(slurm, mutant, "-w", "n3", *slow, NPROC_PER_NODE="2")
    array = ["--array", "7", "slurm/array.sbatch", "x.yaml", *recipe(tiny, max_steps=10_000)]
    jobs["seed"] = Job(slurm, make_project(base / "seed"), "-w", "n3", *array, task=7)
    for name, remove in (("time limit", ""), ("time limit, mutant", REQUEUE)):
        folder = make_project(base / name, remove)
        jobs[name] = Job(slurm, folder, "-w", "n4", "--time", "1", *train, fake=WAIT_FOR_SIGNAL)
    jobs["grace"] = Job(slurm, make_project(base / "grace"), "-w", "n4", *train, fake=WAIT_FOR_SIGNAL)
    kit.until(lambda: "waiting" in jobs["grace"].text())
    slurm("scancel", "--signal=TERM", jobs["grace"].id)
    early = make_project(base / "early", replace=(("    ((nodes == 1)) ||", SIGNAL_BEFORE_LAUNCH),))
    jobs["signal before the launch"] = Job(slurm, early, "-w", "n4", *train, fake="end(0)")
    jobs["no progress"] = Job(slurm, make_project(base / "no_progress"), "-w", "n4", *train, fake="end(75)")
    before_limit = ["--batch", "--signal=USR1"]
    signals = [("two nodes", 3, before_limit), ("seed", 3, []), ("launcher with signals", 1, before_limit)]
    for name, step, how in signals:
        jobs[name].step = jobs[name].until_step(step)
        slurm("scancel", *how, jobs[name].id)
    return jobs


LAUNCHER_DIED = re.compile(r"srun: error: n\d: task 0: (User defined signal 1|Exited with exit code 138)")


def test_mutant_launcher_that_handles_signals(slurm, jobs):
    """It dies, and Slurm ends its processes, which may or may not have saved by then."""
    job = jobs["launcher with signals"]
    job.until(lambda: LAUNCHER_DIED.search(job.text()))
    slurm("scancel", "--full", "--signal=KILL", job.id, check=False)
    slurm("scancel", job.id)
    assert LAUNCHER_DIED.search(job.text()), job.text()


def test_two_nodes_with_time_limit_and_preemption(slurm, jobs, tiny, tmp_path):
    """First the signal before the time limit, then a job of a partition with a higher priority."""
    job = jobs["two nodes"]
    assert job.was_requeued(1, job.step), job.text()
    first = job.step
    job.step = job.until_step(first + 3)
    slurm("sbatch", "-p", "urgent", "-w", "n1,n2", "--exclusive", "--output", "/dev/null", "--wrap", "true")
    undisturbed = kit.run_training(2, tmp_path / "straight", *recipe(tiny))  # while the job ends, waits and starts
    assert job.was_requeued(2, job.step), job.text()
    assert 0 < first < job.step < STEPS
    assert job.end() == ("COMPLETED", 2, "0"), job.text()
    assert kill_storm.differences(undisturbed.folder, job.folder) == []
    assert kit.Run(job.folder).losses() == undisturbed.losses()
    starts = json.loads((job.folder / "environment.json").read_text())["starts"]
    assert [start["step"] for start in starts] == sorted({0, *(start["step"] for start in starts)})
    assert len(starts) == 3
    assert (job.folder / "logs" / "node_1.log").read_text()
    assert not LAUNCHER_DIED.search(job.text())


def test_cancelled_seed_is_saved_and_not_requeued(jobs):
    job = jobs["seed"]
    assert job.end() == ("CANCELLED", 0, "75"), job.text()
    kit.until(lambda: run_status.read_status(job.folder).get("status") == "stopped")
    newest = newest_intact(job.folder)
    assert not atomic_folder.verify(newest)
    assert step_of(newest) >= job.step >= 3
    assert "seed: 7" in (job.folder / "config.yaml").read_text()


@pytest.mark.parametrize(
    "name, state",
    [
        ("time limit", ("COMPLETED", 1, "0")),
        ("time limit, mutant", ("FAILED", 0, "75")),
        ("grace", ("COMPLETED", 1, "0")),  # preempted with grace time: Slurm signals the steps only
        ("signal before the launch", ("COMPLETED", 1, "0")),
        ("no progress", ("FAILED", 1, "75")),
    ],
)
def test_requeue(jobs, name, state):
    assert jobs[name].end() == state, jobs[name].text()


@pytest.mark.parametrize("fake, code", [("sys.exit(3)", 3), ("end(1)", 1), ("end(2)", 2), ("end(0)", 0)])
def test_only_a_stopped_run_is_requeued(slurm, tmp_path, fake, code):
    job = Job(slurm, make_project(tmp_path / "p"), "slurm/train.sbatch", "x.yaml", fake=fake)
    assert job.end() == ("FAILED" if code else "COMPLETED", 0, str(code)), job.text()


@pytest.mark.parametrize("mutant", [False, True])
def test_cancelled_job_is_not_requeued(slurm, tmp_path, mutant):
    folder = make_project(tmp_path / "p", remove=KEEP_CANCELLED if mutant else "")
    job = Job(slurm, folder, "slurm/train.sbatch", "x.yaml", fake=WAIT_FOR_SIGNAL)
    kit.until(lambda: "waiting" in job.text())
    slurm("scancel", job.id)
    kit.until(lambda: job.state() == (("COMPLETED", 1, "0") if mutant else ("CANCELLED", 0, "75")))


# ---- arguments of the launchers ----------------------------------------------------------------------------------------


def port_of(job: Job) -> int:
    return int(re.search(r"--main_process_port (\d+)", job.text())[1])


def printed_arguments(job: Job) -> list[str]:
    return sorted(line for line in job.text().splitlines() if line.startswith("node "))


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_arguments(slurm, tmp_path, nodes):
    words = ["-N", nodes, "slurm/train.sbatch", "x.yaml", "--learning_rate", "1e-3"]
    job = Job(slurm, make_project(tmp_path / "p"), *words, fake="", NPROC_PER_NODE="2", **LOOPBACK)
    assert job.end() == ("COMPLETED", 0, "0"), job.text()
    rendezvous = f" --main_process_ip 127.0.0.1 --main_process_port {port_of(job)}" if nodes > 1 else ""
    assert printed_arguments(job) == [
        f"node {rank} of {'127.0.0.1' if nodes > 1 else ''} launch --machine_rank {rank} --quiet --config_file "
        f"accelerate_configs/cpu_ddp.yaml --num_machines {nodes} --num_processes {2 * nodes}{rendezvous} train.py "
        f"--config x.yaml --output_dir {job.folder} --learning_rate 1e-3"
        for rank in range(nodes)
    ]
    logs = [(job.folder / "logs" / f"node_{rank}.log").read_text().strip() for rank in range(nodes)]
    assert logs == printed_arguments(job)


@pytest.mark.parametrize("nodes, gpus, config", [(1, 1, "gpu"), (1, 8, "ddp"), (2, 1, "ddp")])
def test_one_process_per_gpu(slurm, tmp_path, nodes, gpus, config):
    words = ["-N", nodes, "slurm/train.sbatch", "x.yaml"]
    job = Job(slurm, make_project(tmp_path / "p"), *words, fake="", SLURM_GPUS_ON_NODE=str(gpus), **LOOPBACK)
    assert job.end() == ("COMPLETED", 0, "0"), job.text()
    assert f"accelerate_configs/{config}.yaml --num_machines {nodes} --num_processes {nodes * gpus} " in job.text()


def test_used_port_is_skipped(slurm, tmp_path):
    words = ["-N", "2", "slurm/train.sbatch", "x.yaml"]
    first = Job(slurm, make_project(tmp_path / "first"), *words, fake="", **LOOPBACK)
    first.end()
    with ExitStack() as stack:
        used = [20_000 + (int(first.id) + more) % 10_000 for more in (1, 2)]
        for port in used:
            with suppress(OSError):  # used already
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        second = Job(slurm, make_project(tmp_path / "second"), *words, fake="", **LOOPBACK)
        second.end()
    assert int(second.id) == int(first.id) + 1
    assert port_of(second) > max(used)


def test_array_task_has_its_seed_and_folder(slurm, tmp_path):
    folder = make_project(tmp_path / "p")
    job = Job(slurm, folder, "--array", "3,5", "slurm/array.sbatch", "x.yaml", "--max_steps", "9", fake="")
    kit.until(lambda: len(printed_arguments(job)) == 2)
    for line, seed in zip(printed_arguments(job), (3, 5), strict=True):
        assert "--num_machines 1 --num_processes 1 train.py" in line
        assert line.endswith(f"--output_dir {job.folder}_seed{seed} --max_steps 9 --seed {seed}")
        assert (folder / f"run_seed{seed}" / "logs").is_dir()


@pytest.mark.parametrize("mutant", [None, "localhost", "ended"])
def test_unknown_head_node_ends_the_job_at_once(slurm, tmp_path, mutant):
    """No launcher starts, and the slower node does not change the exit code.

    The mutants let each node meet itself on localhost, and end a node that has not answered yet.
    """
    replace = {
        "localhost": (("HEAD=${HEAD%%", "HEAD=localhost; : ${HEAD%%"),),
        "ended": (("--kill-on-bad-exit=0", "--kill-on-bad-exit=1"),),
    }.get(mutant, ())
    seconds = 600 if mutant == "ended" else 2  # a node that is ended does not sleep so long
    slow = ('\ngetent ahosts "$HEAD"', f'\n((SLURM_NODEID == 0)) || sleep {seconds}; getent ahosts "$HEAD"')
    folder = make_project(tmp_path / "p", replace=(slow, *replace))
    job = Job(slurm, folder, "-N", "2", "slurm/train.sbatch", "x.yaml", fake="")
    assert (job.end() == ("FAILED", 0, "2")) == (mutant is None), job.text()
    assert ("machine_rank" in job.text()) == (mutant == "localhost")
    if mutant is None:
        assert "cannot resolve the head node n" in job.text()


def test_run_folder_is_that_of_make_train(slurm, tmp_path):
    folder = make_project(tmp_path / "p")
    for env in ({}, {"NPROC_PER_NODE": "3"}):
        Job(slurm, folder, "slurm/train.sbatch", "x.yaml", fake="", OUT="", **env).end()
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["x", "x_3proc"]
