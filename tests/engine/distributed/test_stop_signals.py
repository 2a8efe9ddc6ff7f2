"""A stop at any moment saves the run and ends it with exit code 75; a second signal ends it at once."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import train
from engine import startup
from engine.checkpointing import checkpoint_folder, resume
from engine.config.errors import Stopped, UsageError
from engine.config.run_config import RunConfig
from engine.distributed import stop_signals
from engine.process import run_status
from engine.storage import verify_hashes
from src.training import evaluation
from tests.helpers import kit
from tests.helpers.stopping import begin, check_resumes, check_saved, check_stopped, recipe

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]


def until_logged(folder: Path, rank: int) -> None:
    """Wait until this rank has logged that it will stop."""
    kit.until(lambda: "saving after this step" in (folder / "logs" / f"rank_{rank}.log").read_text())


# ---- signals at random moments -----------------------------------------------------------------------------------------


def test_sigterm_at_random_moments_loses_nothing(tiny, tmp_path):
    """To rank 0, to rank 1 or to both, in one run that is resumed each time."""
    flags = recipe(tiny, max_steps=200, eval_steps=50)
    undisturbed = kit.run_training(2, tmp_path / "straight", *flags)
    generator, steps = random.Random(0), []
    for attempt in range(6):
        ranks = begin(tmp_path, flags)
        time.sleep(generator.uniform(0, 0.1))
        ranks.signal(signal.SIGTERM, *[(), (0,), (1,)][attempt % 3])
        steps.append(check_stopped(ranks, tmp_path / "run"))
        assert "Stopped by SIGTERM at" in run_status.read_status(tmp_path / "run")["reason"]  # rank 0 names it, too
    assert steps == sorted(set(steps))
    check_resumes(tmp_path, flags, undisturbed)


def test_signal_to_the_process_groups_of_ranks_with_loaders(tiny, tmp_path):
    """As a terminal or a scheduler sends it."""
    ranks = begin(tmp_path, recipe(tiny, dataloader_num_workers=2))
    ranks.signal(signal.SIGUSR1, group=True)
    check_stopped(ranks, tmp_path / "run")
    assert "Stopped by SIGUSR1 at" in run_status.read_status(tmp_path / "run")["reason"]
    assert ranks.text().count("saving after this step") == 1  # rank 0 prints, once per run
    assert "DataLoader worker" not in ranks.text()


def test_mutant_stop_without_a_decision_of_all_ranks(tiny, tmp_path, monkeypatch):
    def votes(self):
        if self.reason:
            raise Stopped(f"{self.reason}; everything is saved")
        return {"save": 0.0, "stop": 0.0}

    monkeypatch.setattr(stop_signals.StopSignals, "votes", votes)
    ranks = begin(tmp_path, recipe(tiny))
    ranks.signal(signal.SIGTERM, 1)
    with pytest.raises(AssertionError):
        check_stopped(ranks, tmp_path / "run")


# ---- during an evaluation ----------------------------------------------------------------------------------------------


def test_interrupted_evaluation_is_repeated(tiny, tmp_path, monkeypatch):
    """The last one of the run."""
    original = evaluation.seed_everything

    def seed_everything(value):
        if kit.last_step(Path("run")) == 20:  # rank 0 has written the line of this step
            Path("evaluating").touch()
            kit.until(Path("go").exists)
        original(value)

    flags = recipe(tiny, max_steps=20, eval_steps=10, per_device_eval_batch_size=1)
    undisturbed, folder = kit.run_training(2, tmp_path / "straight", *flags), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "seed_everything", seed_everything)
        ranks = kit.Ranks("train.py", *flags, folder=tmp_path, world=2)
    kit.until((tmp_path / "evaluating").exists)
    ranks.signal(signal.SIGTERM, 1)
    until_logged(folder, 1)
    (tmp_path / "go").touch()
    assert check_stopped(ranks, folder) == 20
    assert [line["step"] for line in kit.timeless(folder) if line["kind"] == "eval"] == [10]
    check_resumes(tmp_path, flags, undisturbed)


# ---- twice, early, by file, by clock -----------------------------------------------------------------------------------


def test_second_signal_ends_at_once_in_a_blocking_call(tiny, tmp_path, monkeypatch):
    """Rank 0 waits for rank 1 in a collective."""
    monkeypatch.setattr(stop_signals, "COPY_SECONDS", 0.0)
    ranks = begin(tmp_path, recipe(tiny))
    ranks.signal(signal.SIGSTOP, 1)
    ranks.signal(signal.SIGTERM, 0)
    until_logged(tmp_path / "run", 0)
    assert ranks.processes[0].is_alive()
    ranks.signal(signal.SIGTERM, 0)
    kit.until(lambda: ranks.processes[0].exitcode is not None)
    assert ranks.wait(0) == [128 + signal.SIGTERM, None], ranks.text()
    assert "without saving." in ranks.text()


def bare_signals(folder: Path, **values) -> stop_signals.StopSignals:
    """Return the requests of rank 0, without signal handlers and thread."""
    signals = stop_signals.StopSignals(0, RunConfig(output_dir=str(folder)))
    vars(signals).update(values)
    return signals


def test_copy_of_a_signal_is_no_second_one(tmp_path, monkeypatch):
    """A launcher passes on a signal that the whole process group has received."""
    monkeypatch.setattr(stop_signals, "COPY_SECONDS", 600.0)
    signals = bare_signals(tmp_path)
    for _ in range(2):
        signals.handle(signal.SIGTERM)
    assert signals.reason == "SIGTERM"


def test_signal_while_data_is_prepared(tiny, tmp_path, monkeypatch):
    def slow(*args, **kwargs):
        Path(f"reached_{os.environ['RANK']}").touch()
        time.sleep(600)

    monkeypatch.setattr(train.dataset, "prepare_datasets", slow)
    ranks = kit.Ranks("train.py", *recipe(tiny), folder=tmp_path, world=2)
    kit.until(lambda: {"reached_0", "reached_1"} <= set(os.listdir(tmp_path)))
    ranks.signal(signal.SIGTERM)
    assert ranks.wait() == [75, 75], ranks.text()
    assert not (tmp_path / "run").exists()


def test_signal_while_one_rank_still_loads(tiny, tmp_path, monkeypatch):
    """The other one does not listen yet: it would save alone, and fail because it loses the connection."""
    load = resume.Start.load

    def slow(*args):
        Path(f"reached_{os.environ['RANK']}").touch()
        time.sleep(600 * int(os.environ["RANK"]))
        return load(*args)

    monkeypatch.setattr(resume.Start, "load", slow)
    ranks = kit.Ranks("train.py", *recipe(tiny), folder=tmp_path, world=2)
    kit.until(lambda: {"reached_0", "reached_1"} <= set(os.listdir(tmp_path)))
    time.sleep(0.5)
    ranks.signal(signal.SIGTERM)
    assert ranks.wait() == [75, 75], ranks.text()


def test_signal_to_one_rank_before_the_first_step(tiny, tmp_path, monkeypatch):
    """All ranks stop together, as later."""
    train_batches = train.data_loader.train_batches

    def slow(*args):
        Path(f"reached_{os.environ['RANK']}").touch()
        kit.until(Path("go").exists)
        return train_batches(*args)

    monkeypatch.setattr(train.data_loader, "train_batches", slow)
    ranks = kit.Ranks("train.py", *recipe(tiny), folder=tmp_path, world=2)
    kit.until(lambda: {"reached_0", "reached_1"} <= set(os.listdir(tmp_path)))
    ranks.signal(signal.SIGTERM, 1)
    until_logged(tmp_path / "run", 1)
    (tmp_path / "go").touch()
    assert check_stopped(ranks, tmp_path / "run") == 0


def test_signal_while_other_ranks_are_awaited(tiny, tmp_path):
    """Rank 0 waits in C++ code, in which no handler of Python runs, for a rank that has not been started."""
    address = ("127.0.0.1", kit.free_port())
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(address[1])}
    alone = kit.Ranks("train.py", *recipe(tiny), folder=tmp_path, env=env)
    kit.until(lambda: not alone.processes[0].is_alive() or socket.socket().connect_ex(address) == 0)
    alone.signal(signal.SIGTERM)
    assert alone.wait(60) == [75], alone.text()
    assert "Stopped by SIGTERM before training began" in alone.text()


def test_launcher_that_ends_while_data_is_prepared(tiny, tmp_path, monkeypatch):
    """Its ranks would then wait for its store, for `ddp_timeout` seconds or longer. The thread wakes and looks."""

    def prepare(*_):
        startup.LAUNCHER_PID = -1
        time.sleep(60)

    monkeypatch.setattr(stop_signals, "WAKE_SECONDS", 0.1)
    monkeypatch.setattr(train.dataset, "prepare_datasets", prepare)
    rank = kit.Ranks("train.py", *recipe(tiny), folder=tmp_path, env={"TORCHELASTIC_RUN_ID": "none"})
    assert rank.wait(30) == [75], rank.text()
    assert "Stopped before training began: the launcher has ended" in rank.text()


@pytest.mark.skipif(not Path("/proc/self/exe").exists(), reason="elsewhere the variables have to do")
@pytest.mark.parametrize(
    "name", ["ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_USE_FULLGRAPH", "TORCHELASTIC_RUN_ID"]
)
def test_variable_of_a_launcher_in_a_shell_is_no_launcher(name):
    """Else a run under nohup would stop when its shell ends."""
    program = [sys.executable, "-c", "from engine import startup; print(startup.LAUNCHER_PID)"]
    for command, parent in ((["bash", "-c", '"$@"; true', "-", *program], 0), (program, os.getpid())):
        options = {"env": kit.PLAIN_ENVIRONMENT | {name: "no"}, "cwd": kit.REPOSITORY, "text": True, "check": True}
        done = subprocess.run(command, stdout=subprocess.PIPE, **options)
        assert int(done.stdout) == (0 if name == "ACCELERATE_MIXED_PRECISION" else parent)


def test_main_in_a_thread_says_what_to_do_instead():
    """As Ray Train and notebooks of several threads call it."""
    errors = []

    def main():
        with pytest.raises(UsageError) as caught:
            train.main([])
        errors.append(str(caught.value))

    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
    assert "as a process of its own" in errors[0]


def test_files_save_and_stop(tiny, tmp_path):
    ranks, folder = begin(tmp_path, recipe(tiny)), tmp_path / "run"
    (folder / "save").touch()
    saved = kit.until(lambda: checkpoint_folder.newest_intact(folder))
    assert verify_hashes.verify(saved) == []
    kit.until(lambda: kit.last_step(folder) > checkpoint_folder.step_of(saved) + 1)  # training continues
    (folder / "stop").touch()
    assert check_stopped(ranks, folder) > checkpoint_folder.step_of(saved)
    assert "the file stop" in run_status.read_status(folder)["reason"]
    assert not {"save", "stop"} & set(os.listdir(folder))


def test_time_limit_of_a_run_that_never_resumes(tiny, tmp_path, monkeypatch):
    """Its last line does not promise that the same command resumes."""
    monkeypatch.setattr(stop_signals, "PROCESS_START", time.monotonic())
    flags = recipe(tiny, max_steps=100_000, time_limit=2 / 60, resume="never")
    ranks = kit.Ranks("train.py", *flags, folder=tmp_path, world=2)
    check_stopped(ranks, tmp_path / "run")
    assert "the time limit" in run_status.read_status(tmp_path / "run")["reason"]
    assert "run the same command without resume: never to resume" in ranks.text()


def test_time_limit_leaves_time_for_a_step_and_a_save(tmp_path):
    """One and a half steps of 10 s, two saves of 6 s, one second."""
    for seconds, reason in ((27, "the time limit"), (40, None)):
        deadline = time.monotonic() + seconds
        signals = bare_signals(tmp_path, step_seconds=10.0, save_seconds=6.0, deadline=deadline)
        signals.look(step=1)
        assert signals.reason == reason


def test_questions_change_nothing(tmp_path):
    """A save asked for is asked for until a checkpoint is begun; another rank has no say in that."""
    (tmp_path / "save").touch()
    signals = bare_signals(tmp_path)
    signals.look(step=1)
    assert not (tmp_path / "save").exists()
    before = dict(vars(signals))
    assert signals.votes() == signals.votes() == {"save": 1.0, "stop": 0.0}
    assert signals.stopping() == 0.0
    assert vars(signals) == before


def test_file_stop_holds_a_step(tmp_path):
    """The evaluation of that step is not interrupted, and an empty file ends the run sooner."""
    (tmp_path / "stop").write_text("3\n")
    signals = bare_signals(tmp_path)
    for step in (2, None):
        signals.look(step)
        assert signals.stopping() == 0.0
    signals.look(3)
    assert signals.reason == "the file stop"

    for content in (b"", b"now", b"\xff\xfe5"):  # what is no step stops at once
        (tmp_path / "stop").write_bytes(content)
        signals = bare_signals(tmp_path, stop_step=3)
        signals.look()
        assert signals.reason == "the file stop"
        assert not (tmp_path / "stop").exists()


# ---- launchers ---------------------------------------------------------------------------------------------------------


def launch(folder: Path, *command) -> subprocess.Popen:
    """Start a launcher in a process group of its own, with its output in a file; return when the run has trained."""
    before = kit.last_step(folder / "run")
    words, env = [str(word) for word in command], kit.PLAIN_ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    with open(folder / "output.txt", "w") as output:
        process = subprocess.Popen(words, env=env, stdout=output, stderr=output, start_new_session=True)
    until_step(folder / "run", before + 30)
    return process


def until_step(folder: Path, step: int) -> None:
    kit.until(lambda: kit.last_step(folder) >= step)


def workers(process: subprocess.Popen) -> list[psutil.Process]:
    """Return the training processes of a launcher."""
    return [child for child in psutil.Process(process.pid).children() if "--output_dir" in child.cmdline()]


@pytest.mark.cluster
def test_torchrun_stopped_killed_and_restarted(tiny, tmp_path):
    """A killed worker is restarted and resumes. A worker that stops with 75 is a failure for torchrun, which restarts
    it as well: the run sees that it was stopped, and ends. SIGTERM to the launcher saves. All of it is one run."""
    folder = tmp_path / "run"
    flags = recipe(tiny, max_steps=400, save_steps=20, output_dir=folder)
    undisturbed = kit.run_training(2, tmp_path / "straight", *flags)
    command = [kit.REPOSITORY / "train.py", *flags]
    torchrun = launch(tmp_path, *TORCHRUN, "--max_restarts", "2", *command)
    workers(torchrun)[1].kill()
    until_step(folder, kit.last_step(folder) + 30)
    printed = (tmp_path / "output.txt").read_text()
    workers(torchrun)[0].send_signal(signal.SIGUSR1)
    assert torchrun.wait(300) != 0
    check_saved(folder)
    assert (tmp_path / "output.txt").read_text().removeprefix(printed).count("saving after this step") == 1

    torchrun = launch(tmp_path, *TORCHRUN, *command)
    torchrun.terminate()
    assert torchrun.wait(300) != 0
    check_saved(folder)
    check_resumes(tmp_path, flags, undisturbed)


@pytest.mark.cluster
def test_accelerate_launch_dies_and_its_child_saves(tiny, tmp_path):
    """With one process, accelerate launch dies of SIGTERM and passes nothing on."""
    folder = tmp_path / "run"
    config = kit.REPOSITORY / "accelerate_configs" / "cpu.yaml"
    command = [kit.REPOSITORY / "train.py", *recipe(tiny, max_steps=100_000, output_dir=folder)]
    accelerate = launch(tmp_path, *ACCELERATE, config, *command)
    [worker] = workers(accelerate)
    accelerate.terminate()
    assert accelerate.wait(300) == -signal.SIGTERM
    kit.until(lambda: run_status.read_status(folder)["status"] == "stopped")
    check_saved(folder)
    assert "the end of the launcher" in run_status.read_status(folder)["reason"]
    kit.until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
