"""A stop at any moment saves the run and ends it with exit code 75; a second signal ends it at once."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import train
from src.checkpointing import checkpoint_list
from src.config.errors import Stopped
from src.distributed import stop_signals
from src.runtime import run_status
from src.storage import atomic_folder
from src.tasks import causal_lm
from src.training import evaluation
from tests.helpers import kit
from tests.helpers.stopping import begin, check_resumes, check_saved, check_stopped, recipe

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
PLAIN_ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}


@pytest.fixture(scope="module")
def straight(tiny, tmp_path_factory) -> kit.Run:
    """An undisturbed run on two processes."""
    return kit.run_training(2, tmp_path_factory.mktemp("straight") / "run", *recipe(tiny))


@pytest.fixture(autouse=True)
def noted_signals(monkeypatch) -> None:
    """Let a rank append a byte to the file handled_RANK after each signal that it has handled."""
    handle = stop_signals.StopSignals._handle

    def handle_and_note(self, number):
        handle(self, number)
        with open(f"handled_{self.rank}", "ab") as file:
            file.write(b"x")

    monkeypatch.setattr(stop_signals.StopSignals, "_handle", handle_and_note)


@pytest.fixture(autouse=True)
def no_process_is_left(tmp_path):
    yield
    for name in ("go", "never"):  # end the loops of `block_step_5`, whose ranks have ended without them
        (tmp_path / name).touch()
    kit.until(lambda: not processes_in(tmp_path), 60)


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return the processes that work in a folder, or name it in their command line."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd().startswith(str(folder)) or str(folder) in " ".join(process.cmdline()):
                found.append(process)
    return found


def until_handled(folder: Path, chosen: tuple[int, ...] = (0, 1), count: int = 1) -> None:
    """Wait until each of these ranks has handled so many signals."""
    files = [folder / f"handled_{rank}" for rank in chosen]
    kit.until(lambda: all(file.exists() and file.stat().st_size >= count for file in files))
    for file in files:
        file.unlink()


# ---- signals at random moments -----------------------------------------------------------------------------------------


def test_sigterm_at_random_moments_loses_nothing(tiny, tmp_path):
    """To rank 0, to rank 1 or to both, in one run that is resumed each time."""
    flags = recipe(tiny, max_steps=200, eval_steps=50)
    undisturbed = kit.run_training(2, tmp_path / "straight", *flags)
    generator, steps = random.Random(0), []
    for attempt in range(9):
        ranks = begin(tmp_path, flags)
        time.sleep(generator.uniform(0, 0.1))
        ranks.signal(signal.SIGTERM, *[(), (0,), (1,)][attempt % 3])
        steps.append(check_stopped(ranks, tmp_path / "run"))
    assert steps == sorted(set(steps))
    check_resumes(tmp_path, flags, undisturbed)


@pytest.mark.parametrize("workers", [0, 2])
def test_any_signal_to_any_rank_stops_all(tiny, straight, tmp_path, workers):
    """With loader processes the signal goes to the process group of a rank, as a terminal or a scheduler sends it."""
    flags = recipe(tiny, dataloader_num_workers=workers)
    cases = [(signal.SIGINT, (1,)), (signal.SIGUSR1, (0,))]
    for number, chosen in [(signal.SIGTERM, ()), (signal.SIGINT, ())] if workers else cases:
        ranks = begin(tmp_path, flags)
        time.sleep(random.uniform(0, 0.1))
        ranks.signal(number, *chosen, group=bool(workers))
        check_stopped(ranks, tmp_path / "run")
        assert ranks.text().count("saving after this step") == (chosen != (1,))  # rank 0 prints, once per run
        assert "DataLoader worker" not in ranks.text()
    check_resumes(tmp_path, flags, straight)


@pytest.mark.parametrize("chosen", [(1,), ()], ids=["one rank stops alone", "all stop without saving"])
def test_mutant_stop_without_a_decision_of_all_ranks(tiny, tmp_path, monkeypatch, chosen):
    def requests(self):
        if self.reason:
            raise Stopped(f"{self.reason}; everything is saved")
        return [0.0, 0.0]

    monkeypatch.setattr(stop_signals.StopSignals, "requests", requests)
    ranks = begin(tmp_path, recipe(tiny))
    ranks.signal(signal.SIGTERM, *chosen)
    with pytest.raises(AssertionError):
        check_stopped(ranks, tmp_path / "run")


# ---- during an evaluation ----------------------------------------------------------------------------------------------


@pytest.fixture
def waiting_evaluation(monkeypatch) -> None:
    """Let rank 0 create the file evaluating_STEP in an evaluation, and all ranks wait for go_STEP, if WAITS is set."""
    original = evaluation.seed_everything

    def seed_everything(value):
        if "WAITS" in os.environ:
            step = kit.last_step(Path("run"))  # rank 0 has written the line of this step
            if os.environ["RANK"] == "0":
                Path(f"evaluating_{step}").touch()
            kit.until(Path(f"go_{step}").exists)  # also on rank 1, or it could ask for a stop before the signal comes
        original(value)

    monkeypatch.setattr(evaluation, "seed_everything", seed_everything)


def begin_evaluation(folder: Path, flags: list[str], step: int) -> kit.Ranks:
    """Start the command, and return when it evaluates in this step; earlier evaluations do not wait."""
    for mark in folder.glob("*_[0-9]*"):  # of an earlier launch
        mark.unlink()
    if step > 10:
        (folder / "go_10").touch()
    ranks = kit.Ranks("train.py", *flags, folder=folder, world=2, env={"WAITS": "1"})
    kit.until((folder / f"evaluating_{step}").exists)
    return ranks


def evaluated_steps(folder: Path) -> list[int]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["kind"] == "eval"]


def evaluation_recipe(tiny, **fields) -> list[str]:
    return recipe(tiny, max_steps=20, eval_steps=10, per_device_eval_batch_size=1, **fields)


def test_interrupted_evaluation_is_repeated(tiny, tmp_path, waiting_evaluation):
    """Interrupted in the middle of the run, again after the resume, and in the last evaluation of the run."""
    flags, folder = evaluation_recipe(tiny), tmp_path / "run"
    undisturbed = kit.run_training(2, tmp_path / "straight", *flags)
    for chosen in ((1,), (0, 1)):
        ranks = begin_evaluation(tmp_path, flags, 10)
        ranks.signal(signal.SIGTERM, *chosen)
        until_handled(tmp_path, chosen)
        (tmp_path / "go_10").touch()
        assert check_stopped(ranks, folder) == 10
        assert evaluated_steps(folder) == []
    ranks = begin_evaluation(tmp_path, flags, 20)
    assert evaluated_steps(folder) == [10]
    ranks.signal(signal.SIGUSR1, 0)
    until_handled(tmp_path, (0,))
    (tmp_path / "go_20").touch()
    assert check_stopped(ranks, folder) == 20
    assert evaluated_steps(folder) == [10]
    check_resumes(tmp_path, flags, undisturbed)
    assert evaluated_steps(folder) == [10, 20]

    names = ("metrics.jsonl", "ledger.jsonl", "final/model.safetensors", "checkpoints/step_00000020/manifest.json")
    before = [(folder / name).read_bytes() for name in names]
    again = kit.Ranks("train.py", *flags, folder=tmp_path, world=2)
    assert again.wait() == [0, 0], again.text()
    assert [(folder / name).read_bytes() for name in names] == before  # a complete run stays as it is
    assert not list(folder.glob("*.old*"))


def test_file_save_during_an_evaluation(tiny, tmp_path, waiting_evaluation):
    ranks = begin_evaluation(tmp_path, evaluation_recipe(tiny, save_total_limit=9), 10)
    save = tmp_path / "run" / "save"
    save.touch()
    kit.until(lambda: not save.exists())  # the request is noted
    for step in (10, 20):
        (tmp_path / f"go_{step}").touch()
    assert ranks.wait() == [0, 0], ranks.text()
    steps = [checkpoint_list.step_of(path) for path in checkpoint_list.list_checkpoints(tmp_path / "run")]
    assert steps == [11, 20]


# ---- twice, early, by file, by clock -----------------------------------------------------------------------------------


def block_step_5(monkeypatch, go: Path, is_blocked=lambda rank: True) -> None:
    """Let step 5 wait for the file `go` on some ranks; the others wait for them in a collective."""
    original, calls = train.optimizer_step, 0

    def optimizer_step(*args):
        nonlocal calls
        calls += 1
        if calls == 5:
            Path("blocked").touch()
            if is_blocked(int(os.environ["RANK"])):
                subprocess.run(
                    ["sh", "-c", f"until [ -e {go} ]; do sleep 0.1; done"], check=False
                )  # blocks this thread
        return original(*args)

    monkeypatch.setattr(train, "optimizer_step", optimizer_step)


@pytest.mark.parametrize("number, second", [(signal.SIGTERM, ()), (signal.SIGUSR1, ()), (signal.SIGINT, (1,))])
def test_second_signal_ends_at_once_in_a_blocking_call(tiny, tmp_path, monkeypatch, number, second):
    block_step_5(monkeypatch, Path("never"), lambda rank: rank == 1)
    ranks = begin(tmp_path, recipe(tiny))
    kit.until((tmp_path / "blocked").exists)
    ranks.signal(number)
    until_handled(tmp_path)
    time.sleep(stop_signals.COPY_SECONDS + 0.3)
    assert all(process.is_alive() for process in ranks.processes)
    ranks.signal(number, *second)
    alone = bool(second)  # then the other rank loses the connection, or its launcher ends it
    assert ranks.wait() == [1 if alone else 128 + number, 128 + number], ranks.text()
    assert ranks.text().count("without saving.") == (1 if alone else 2)  # of one launcher: once


def test_copies_of_a_signal_within_a_second(tiny, straight, tmp_path, monkeypatch):
    """A launcher passes on a signal that the whole process group has received."""
    with monkeypatch.context() as patch:
        block_step_5(patch, Path("go"))
        patch.setattr(stop_signals, "COPY_SECONDS", 600)  # of a slow machine
        ranks = begin(tmp_path, recipe(tiny))
        kit.until((tmp_path / "blocked").exists)
        for _ in range(2):
            ranks.signal(signal.SIGTERM)
            until_handled(tmp_path)
        (tmp_path / "go").touch()
        assert check_stopped(ranks, tmp_path / "run") == 5
    check_resumes(tmp_path, recipe(tiny), straight)


@pytest.mark.parametrize(
    "holder, name",
    [(causal_lm.Task, "encode"), (causal_lm.Task, "build"), (stop_signals.StopSignals, "begin")],
    ids=["data", "model", "run folder"],
)
def test_signal_before_training(tiny, tmp_path, monkeypatch, holder, name):
    receive = stop_signals.exit_on_signal

    def receive_and_note():
        receive()
        Path(f"receives_{os.environ['RANK']}").touch()

    def slow(*args, **kwargs):
        Path("reached").touch()
        time.sleep(600)

    monkeypatch.setattr(stop_signals, "exit_on_signal", receive_and_note)
    monkeypatch.setattr(holder, name, slow)
    ranks = kit.Ranks("train.py", *recipe(tiny, cache_dir=tmp_path / "cache"), folder=tmp_path, world=2)
    kit.until(lambda: {"receives_0", "receives_1", "reached"} <= set(os.listdir(tmp_path)))
    ranks.signal(signal.SIGTERM)
    assert ranks.wait() == [75, 75], ranks.text()
    assert not (tmp_path / "run" / "checkpoints").exists()
    status = run_status.read_status(tmp_path / "run")
    assert not status or (status["status"], status["exit_code"]) == ("stopped", 75)


def test_request_that_comes_while_requests_are_read():
    """The file `save` is gone then: whoever made it expects a save."""

    class Signals(stop_signals.StopSignals):
        reason, step_seconds, last_boundary, requested, comes = None, 0.0, None, False, True

        @property
        def save_requested(self):
            found, self.requested, self.comes = self.requested, self.requested or self.comes, False
            return found

        @save_requested.setter
        def save_requested(self, value):
            self.requested = value

    signals = Signals.__new__(Signals)
    assert [signals.requests()[0] for _ in range(3)] == [0.0, 1.0, 0.0]


def test_files_save_and_stop(tiny, straight, tmp_path):
    flags, folder = recipe(tiny), tmp_path / "run"
    ranks = begin(tmp_path, flags)
    (folder / "save").touch()
    saved = kit.until(lambda: checkpoint_list.newest_intact(folder))
    assert atomic_folder.verify(saved) == []
    kit.until(lambda: kit.last_step(folder) > checkpoint_list.step_of(saved) + 1)  # training continues
    (folder / "stop").touch()
    assert check_stopped(ranks, folder) > checkpoint_list.step_of(saved)
    assert "the file stop" in run_status.read_status(folder)["reason"]
    assert not {"save", "stop"} & set(os.listdir(folder))
    check_resumes(tmp_path, flags, straight)


def test_time_limit(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(stop_signals, "PROCESS_START", time.monotonic())
    ranks = kit.Ranks("train.py", *recipe(tiny, max_steps=100_000, time_limit=2 / 60), folder=tmp_path, world=2)
    check_stopped(ranks, tmp_path / "run")
    assert "the time limit" in run_status.read_status(tmp_path / "run")["reason"]


@pytest.mark.parametrize("seconds, reason", [(27, "the time limit"), (40, None)])
def test_time_limit_leaves_time_for_a_step_and_a_save(tmp_path, seconds, reason):
    """One and a half steps of 10 s, two saves of 6 s, two polls."""
    signals = stop_signals.StopSignals.__new__(stop_signals.StopSignals)
    vars(signals).update(folder=tmp_path, reason=None, save_requested=False, step_seconds=10.0, save_seconds=6.0)
    signals.deadline = time.monotonic() + seconds
    signals._poll_requests()
    assert signals.reason == reason


# ---- launchers ---------------------------------------------------------------------------------------------------------


class Launch:
    """A launcher in a process group of its own, with its output in a file."""

    def __init__(self, folder: Path, *command):
        self.folder, self.output = folder / "run", folder / "output.txt"
        self.process = subprocess.Popen(
            [str(word) for word in command],
            cwd=kit.REPOSITORY,
            env=PLAIN_ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdout=self.output.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def until_step(self, step: int) -> "Launch":
        kit.until(lambda: self.process.poll() is not None or kit.last_step(self.folder) >= step)
        assert self.process.poll() is None, self.output.read_text()
        return self

    def workers(self) -> list[psutil.Process]:
        """Return the training processes by rank: those that hold the log files of the ranks."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            for file in process.open_files():
                if match := re.fullmatch(re.escape(str(self.folder)) + r"/logs/rank_(\d+)\.log", file.path):
                    found[int(match[1])] = process
        return [found[rank] for rank in sorted(found)]


def long_recipe(tiny, folder: Path, **fields) -> list[str]:
    """A run that no signal misses."""
    return recipe(tiny, **{"max_steps": 400, "save_steps": 20, "output_dir": folder} | fields)


def test_torchrun_stopped_killed_and_restarted(tiny, tmp_path):
    """A killed worker is restarted and resumes. A worker that stops with 75 is a failure for torchrun, which restarts
    it as well: the run sees that it was stopped, and ends. SIGTERM to the launcher saves. All of it is one run."""
    flags, folder = long_recipe(tiny, tmp_path / "run"), tmp_path / "run"
    undisturbed = kit.run_training(2, tmp_path / "straight", *flags)
    command = [kit.REPOSITORY / "train.py", *flags]
    launch = Launch(tmp_path, *TORCHRUN, "--max_restarts", "2", *command).until_step(30)
    launch.workers()[1].kill()
    launch.until_step(kit.last_step(folder) + 30)
    printed = launch.output.read_text()
    launch.workers()[0].send_signal(signal.SIGUSR1)
    assert launch.process.wait(300) != 0
    step = check_saved(folder)
    assert launch.output.read_text().removeprefix(printed).count("saving after this step") == 1

    launch = Launch(tmp_path, *TORCHRUN, *command).until_step(step + 30)
    launch.process.terminate()
    assert launch.process.wait(300) != 0
    check_saved(folder)
    check_resumes(tmp_path, flags, undisturbed)


def test_killed_rank_ends_the_others(tiny, straight, tmp_path):
    flags = recipe(tiny, save_steps=20)
    ranks = begin(tmp_path, flags)
    ranks.signal(signal.SIGKILL, 1)
    assert ranks.wait() == [1, -signal.SIGKILL], ranks.text()
    assert run_status.read_status(tmp_path / "run")["status"] == "failed"
    check_resumes(tmp_path, flags, straight)


def test_accelerate_launch_dies_and_its_child_saves(tiny, tmp_path):
    """With one process, accelerate launch dies of SIGTERM and passes nothing on."""
    folder = tmp_path / "run"
    config = kit.REPOSITORY / "accelerate_configs" / "cpu.yaml"
    command = [kit.REPOSITORY / "train.py", *long_recipe(tiny, folder, max_steps=100_000)]
    launch = Launch(tmp_path, *ACCELERATE, config, *command).until_step(30)
    [worker] = launch.workers()
    launch.process.terminate()
    assert launch.process.wait(300) == -signal.SIGTERM
    kit.until(lambda: run_status.read_status(folder)["status"] == "stopped")
    check_saved(folder)
    assert "the end of the launcher" in run_status.read_status(folder)["reason"]
    kit.until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
