"""Whoever asks a run to stop, and whenever, gets a saved run and exit code 75; whoever asks twice gets its end."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import train
from src.checkpointing import checkpoint_list
from src.checkpointing.checkpointer import Checkpointer
from src.config.errors import Stopped
from src.distributed import stop_signals
from src.reporting.ledger import Ledger
from src.runtime import run_status
from src.storage import atomic_folder
from src.training import evaluation
from tests.helpers import kit

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
PLAIN = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
SHORT, LONG = 100, 400  # steps


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict:
    return kit.tiny_files(tmp_path_factory.mktemp("tiny"))


def recipe(tiny, **fields) -> list[str]:
    """Only a stop saves: a run that is not saved by it has nothing to go on from."""
    values = {"global_batch_size": 8, "per_device_batch_size": 2, "per_device_eval_batch_size": 4, "output_dir": "run"}
    values |= {"max_steps": SHORT, "learning_rate": 3e-3, "logging_steps": 1, "eval_steps": 30, "save_steps": 10_000}
    return kit.flags(**tiny | values | fields)


@pytest.fixture(scope="module")
def straight(tiny, tmp_path_factory) -> kit.Run:
    """SHORT undisturbed steps on two processes."""
    return kit.run_training(2, tmp_path_factory.mktemp("short") / "run", *recipe(tiny))


def begin(folder: Path, flags: list[str], world: int = 2, env=None) -> kit.Ranks:
    """Start the command in `folder`, and return when it has trained a step (more than there were)."""
    before = kit.last_step(folder / "run")
    ranks = kit.Ranks("train.py", *flags, folder=folder, world=world, env=env)
    kit.until(lambda: kit.last_step(folder / "run") > before)
    return ranks


def check_stopped(ranks: kit.Ranks, folder: Path) -> int:
    """Assert that all ranks ended with 75 in time, and that every step whose line was written is saved; return the step."""
    codes = ranks.wait(15)
    assert codes == [75] * len(codes), ranks.text()
    newest = checkpoint_list.list_checkpoints(folder)[-1]
    assert atomic_folder.verify(newest) == []
    step = checkpoint_list.step_of(newest)
    assert step == kit.last_step(folder)
    told = run_status.read_status(folder)
    assert (told["status"], told["step"], told["exit_code"]) == ("stopped", step, 75)
    assert f"at step {step:,}. Saved to run" in ranks.text()
    return step


def finish(folder: Path, flags: list[str], world: int, undisturbed: kit.Run) -> None:
    """Give the same command once more, and assert that the run is, to the last bit, the undisturbed one."""
    ranks = kit.Ranks("train.py", *flags, folder=folder, world=world)
    assert ranks.wait(60) == [0] * world, ranks.text()
    assert kit.timeless(folder / "run") == kit.timeless(undisturbed.folder)
    assert kit.same(kit.Run(folder / "run").weights, undisturbed.weights)
    assert run_status.read_status(folder / "run")["status"] == "complete"


# ---- signals at random moments ------------------------------------------------------------------------------------------


def test_twenty_times_sigterm_at_random_moments_loses_nothing(tiny, tmp_path):
    """To one rank of two, or to both, in one run that goes on again and again: 20 of 20 saved, each within 15 s."""
    flags = recipe(tiny, max_steps=LONG, eval_steps=50)
    straight = kit.run_training(2, tmp_path / "straight", *flags)
    moment, stopped = random.Random(0), []
    for turn in range(20):
        ranks = begin(tmp_path, flags)
        time.sleep(moment.uniform(0, 0.1))
        ranks.signal(signal.SIGTERM, *[(), (0,), (1,)][turn % 3])
        stopped.append(check_stopped(ranks, tmp_path / "run"))
    assert stopped == sorted(set(stopped))
    finish(tmp_path, flags, 2, straight)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_signal_to_any_rank_stops_all(tiny, straight, tmp_path, workers):
    """With loader processes it goes to the process group of a rank, as a terminal or a scheduler sends it."""
    flags = recipe(tiny, dataloader_num_workers=workers)
    cases = [(signal.SIGINT, ()), (signal.SIGINT, (1,)), (signal.SIGUSR1, (0,)), (signal.SIGUSR1, ())]
    for number, chosen in cases if not workers else [(signal.SIGTERM, ()), (signal.SIGINT, (1,))]:
        ranks = begin(tmp_path, flags)
        time.sleep(random.uniform(0, 0.1))
        ranks.signal(number, *chosen, group=bool(workers))
        check_stopped(ranks, tmp_path / "run")
        assert f"{stop_signals.DISPLAY_NAMES.get(number.name, number.name)}: saving after this step" in ranks.text()
        assert "DataLoader worker" not in ranks.text()
    finish(tmp_path, flags, 2, straight)


def test_mutant_a_signal_that_one_rank_obeys_alone_is_caught(tiny, tmp_path, monkeypatch):
    def requests(self):
        if self.reason:
            raise Stopped(f"{self.reason}; everything is saved")
        return [0.0, 0.0]

    monkeypatch.setattr(stop_signals.StopSignals, "requests", requests)
    ranks = begin(tmp_path, recipe(tiny))
    ranks.signal(signal.SIGTERM, 1)
    with pytest.raises(AssertionError):
        check_stopped(ranks, tmp_path / "run")


def test_mutant_a_stop_that_does_not_save_is_caught(tiny, tmp_path, monkeypatch):
    def stop(self, reason):
        raise Stopped(f"{reason}; everything is saved")

    flags = recipe(tiny, save_steps=10)
    monkeypatch.setattr(Checkpointer, "stop", stop)
    ranks = kit.Ranks("train.py", *flags, folder=tmp_path, world=2)
    kit.until(
        lambda: kit.last_step(tmp_path / "run") % 10 in (3, 4, 5) and checkpoint_list.list_checkpoints(tmp_path / "run")
    )
    ranks.signal(signal.SIGTERM)
    with pytest.raises(AssertionError):
        check_stopped(ranks, tmp_path / "run")


# ---- during an evaluation ------------------------------------------------------------------------------------------------


def slow_evaluation(monkeypatch) -> None:
    """Make each micro-batch of an evaluation take 0.1 s where SLOW is set, and leave a file when it begins."""
    original = evaluation.seed_everything

    def seed(value):
        if "SLOW" in os.environ:
            Path("evaluating").touch()
            time.sleep(0.1)
        original(value)

    monkeypatch.setattr(evaluation, "seed_everything", seed)


def in_evaluation(folder: Path, flags: list[str]) -> kit.Ranks:
    (folder / "evaluating").unlink(missing_ok=True)
    ranks = kit.Ranks("train.py", *flags, folder=folder, world=2, env={"SLOW": "1"})
    kit.until((folder / "evaluating").exists)
    return ranks


def evaluated(folder: Path) -> list[int]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["kind"] == "eval"]


def test_a_signal_during_an_evaluation_leaves_it_and_does_it_again(tiny, tmp_path, monkeypatch):
    """In the middle of the run, again when that evaluation is taken up, and in the last one of the run."""
    flags = recipe(tiny, max_steps=20, eval_steps=10, per_device_eval_batch_size=1)  # 21 micro-batches: over a second
    straight = kit.run_training(2, tmp_path / "straight", *flags)
    slow_evaluation(monkeypatch)
    for chosen, step, done in (((1,), 10, []), ((), 10, [])):
        ranks = in_evaluation(tmp_path, flags)
        ranks.signal(signal.SIGTERM, *chosen)
        assert check_stopped(ranks, tmp_path / "run") == step
        assert evaluated(tmp_path / "run") == done
    ranks = in_evaluation(tmp_path, flags)
    kit.until(lambda: evaluated(tmp_path / "run") == [10] and kit.last_step(tmp_path / "run") == 20)
    ranks.signal(signal.SIGUSR1, 0)
    assert check_stopped(ranks, tmp_path / "run") == 20
    assert evaluated(tmp_path / "run") == [10]
    finish(tmp_path, flags, 2, straight)
    assert evaluated(tmp_path / "run") == [10, 20]

    kept = ("metrics.jsonl", "ledger.jsonl", "final/model.safetensors", "checkpoints/step_00000020/manifest.json")
    before = [(tmp_path / "run" / name).read_bytes() for name in kept]
    again = kit.Ranks("train.py", *flags, folder=tmp_path, world=2)
    assert again.wait() == [0, 0], again.text()
    assert "nothing is left to train" in again.text()
    assert [(tmp_path / "run" / name).read_bytes() for name in kept] == before
    assert not list((tmp_path / "run").glob("*.old*"))


def test_the_file_save_counts_during_an_evaluation_too(tiny, tmp_path, monkeypatch):
    slow_evaluation(monkeypatch)
    flags = recipe(tiny, max_steps=20, eval_steps=10, per_device_eval_batch_size=1, save_total_limit=9)
    ranks = in_evaluation(tmp_path, flags)
    (tmp_path / "run" / "save").touch()
    assert ranks.wait() == [0, 0], ranks.text()
    assert not (tmp_path / "run" / "save").exists()
    saved = [checkpoint_list.step_of(path) for path in checkpoint_list.list_checkpoints(tmp_path / "run")]
    assert saved[0] in (10, 11)
    assert saved[1:] == [20]


# ---- twice, too early, and not at all ------------------------------------------------------------------------------------


def held_up(monkeypatch, seconds: float, where=lambda rank: True) -> None:
    """Make step 5 wait in a blocking call for so long, on the ranks of `where`; all others then wait in a collective."""
    original, count = train.optimizer_step, [0]

    def update(*args):
        count[0] += 1
        if count[0] == 5:
            Path("held_up").touch()
            if where(int(os.environ["RANK"])):
                subprocess.run(["sleep", str(seconds)], check=False)
        return original(*args)

    monkeypatch.setattr(train, "optimizer_step", update)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_second_signal_ends_at_once_even_in_a_blocking_call(tiny, tmp_path, monkeypatch, number):
    """Rank 1 waits for a child, rank 0 in a collective for rank 1; neither comes to the next step."""
    held_up(monkeypatch, 600, lambda rank: rank == 1)
    ranks = begin(tmp_path, recipe(tiny))
    kit.until((tmp_path / "held_up").exists)
    ranks.signal(number)
    time.sleep(stop_signals.COPY_SECONDS + 0.3)
    assert all(process.is_alive() for process in ranks.processes)
    ranks.signal(number)
    assert ranks.wait(5) == [128 + number] * 2, ranks.text()
    assert "without saving" in ranks.text()


def test_two_copies_of_a_signal_within_a_second_count_as_one(tiny, straight, tmp_path, monkeypatch):
    """A launcher passes on what the whole process group got already."""
    with monkeypatch.context() as patch:
        held_up(patch, 2.5)
        ranks = begin(tmp_path, recipe(tiny))
        kit.until((tmp_path / "held_up").exists)
        ranks.signal(signal.SIGTERM)
        time.sleep(stop_signals.COPY_SECONDS / 4)
        ranks.signal(signal.SIGTERM)
        assert check_stopped(ranks, tmp_path / "run") == 5
    finish(tmp_path, recipe(tiny), 2, straight)


BEFORE_TRAINING = {"prepare_datasets": train.dataset, "make_optimizer": train.optimizers, "build_model": train}
BEFORE_TRAINING["begin"] = Ledger  # the last to begin


@pytest.mark.parametrize("moment", sorted(BEFORE_TRAINING))
def test_a_signal_before_training_begins_ends_with_75(tiny, tmp_path, monkeypatch, moment):
    """While data is prepared, the model is built, and the run takes its place.

    DEFECT: in load nobody listens yet (-15); in begin, status.json says `running` for ever."""
    holder = BEFORE_TRAINING[moment]
    original = getattr(holder, moment)

    def slow(*args, **kwargs):
        Path("begun").touch()
        time.sleep(30)
        return original(*args, **kwargs)

    monkeypatch.setattr(holder, moment, slow)
    ranks = kit.Ranks("train.py", *recipe(tiny), folder=tmp_path, world=2)
    kit.until((tmp_path / "begun").exists)
    time.sleep(0.3)
    ranks.signal(signal.SIGTERM)
    assert ranks.wait(10) == [75, 75], ranks.text()
    assert not (tmp_path / "run" / "checkpoints").exists()
    told = run_status.read_status(tmp_path / "run")
    assert not told or (told["status"], told["exit_code"]) == ("stopped", 75)


# ---- files, and the clock ------------------------------------------------------------------------------------------------


def test_the_files_save_and_stop_do_what_they_say(tiny, straight, tmp_path, monkeypatch):
    update = train.optimizer_step
    # Files are looked at twice a second: the run must last longer than that.
    monkeypatch.setattr(train, "optimizer_step", lambda *args: (time.sleep(0.03), update(*args))[1])
    flags, folder = recipe(tiny), tmp_path / "run"
    ranks = begin(tmp_path, flags)
    (folder / "save").touch()
    saved = kit.until(lambda: checkpoint_list.newest_intact(folder))
    assert atomic_folder.verify(saved) == []
    kit.until(lambda: kit.last_step(folder) > checkpoint_list.step_of(saved) + 3)  # it goes on
    (folder / "stop").touch()
    assert check_stopped(ranks, folder) > checkpoint_list.step_of(saved)
    assert "the file stop" in run_status.read_status(folder)["reason"]
    assert not (folder / "save").exists()
    assert not (folder / "stop").exists()
    finish(tmp_path, flags, 2, straight)


def test_the_time_limit_saves_and_stops_in_time(tiny, tmp_path, monkeypatch):
    started, limit = time.time(), 6.0
    monkeypatch.setattr(stop_signals, "PROCESS_START", time.monotonic())
    ranks = kit.Ranks("train.py", *recipe(tiny, max_steps=100_000, time_limit=limit / 60), folder=tmp_path, world=2)
    check_stopped(ranks, tmp_path / "run")
    told = run_status.read_status(tmp_path / "run")
    assert "the time limit" in told["reason"]
    assert told["time"] <= started + limit


# ---- status, lock, restarts -----------------------------------------------------------------------------------------------


def code_of(folder: Path, launcher: int = 1) -> int:
    """Return what `python -m src.runtime.run_status` says is the exit code of a run."""
    command = [sys.executable, "-m", "src.runtime.run_status", str(folder), str(launcher)]
    return int(subprocess.run(command, cwd=kit.REPOSITORY, capture_output=True, text=True, check=True).stdout)


def test_status_says_how_a_run_stands(tiny, tmp_path, monkeypatch):
    flags, folder = recipe(tiny), tmp_path / "run"
    assert code_of(folder, launcher=143) == 143
    ranks = begin(tmp_path, flags, world=1)
    assert run_status.read_status(folder) | {"time": 0} == {
        "status": "running",
        "step": 0,
        "exit_code": None,
        "reason": "",
        "launcher": os.getpid(),
        "time": 0,
    }
    ranks.signal(signal.SIGTERM)
    step = check_stopped(ranks, folder)
    assert run_status.read_status(folder)["reason"].startswith(f"Stopped by SIGTERM at step {step}")
    assert code_of(folder) == 75

    with monkeypatch.context() as patch:
        patch.setattr(train, "compute_gradient", lambda *args: 1 / 0)
        assert kit.Ranks("train.py", *flags, folder=tmp_path).wait() == [1]
    told = run_status.read_status(folder)
    assert (told["status"], told["step"], told["exit_code"]) == ("failed", step, 1)
    assert told["reason"] == "ZeroDivisionError: division by zero"

    assert kit.Ranks("train.py", *flags, folder=tmp_path).wait() == [0]
    told = run_status.read_status(folder)
    assert (told["status"], told["step"], told["exit_code"]) == ("complete", SHORT, 0)
    assert code_of(folder, launcher=1) == 0


def test_a_second_process_on_the_same_folder_is_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(run_status, "lock_run_folder", partial(run_status.lock_run_folder, patience=0.5))
    flags = recipe(tiny, max_steps=100_000)
    first = begin(tmp_path, flags, world=1)
    copy = tmp_path / "elsewhere"
    second = kit.Ranks("train.py", *flags, "--output_dir", tmp_path / "run", folder=copy, world=2)
    assert second.wait(20) == [2, 2], second.text()
    assert "another process trains in" in second.text()
    assert first.processes[0].is_alive()
    first.signal(signal.SIGTERM)
    step = check_stopped(first, tmp_path / "run")
    assert [line["step"] for line in kit.timeless(tmp_path / "run") if line["kind"] == "train"] == list(
        range(1, step + 1)
    )


def test_the_lock_outlives_no_process(tiny, straight, tmp_path, monkeypatch):
    """After SIGKILL of a whole run the same command trains at once."""
    monkeypatch.setattr(run_status, "lock_run_folder", partial(run_status.lock_run_folder, patience=0.5))
    ranks = begin(tmp_path, recipe(tiny, save_steps=10))
    ranks.signal(signal.SIGKILL)
    assert ranks.wait() == [-9, -9]
    finish(tmp_path, recipe(tiny, save_steps=10), 2, straight)


def taken(folder: Path, how: str) -> dict[str, bytes] | None:
    """Take the folder away from its trainer; return the contents of the folder that is put in its place, if one is."""
    if how == "moved":
        folder.rename(folder.with_name("elsewhere"))
        return None
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)  # a trainer may write in the middle of it
    if how == "deleted":
        return None
    (folder / "logs").mkdir(parents=True)
    for name in ("metrics.jsonl", "status.json", "save", "logs/rank_0.log"):
        (folder / name).write_text("")
    return {name: (folder / name).read_bytes() for name in os.listdir(folder) if (folder / name).is_file()}


@pytest.mark.parametrize("how", ["moved", "deleted", "replaced", "replaced while suspended"])
def test_a_trainer_whose_folder_is_gone_ends_without_writing(tiny, tmp_path, how):
    flags, folder = recipe(tiny, max_steps=100_000, save_steps=5), tmp_path / "run"
    ranks = begin(tmp_path, flags)
    if "suspended" in how:
        ranks.signal(signal.SIGSTOP)
    before = taken(folder, how)
    if "suspended" in how:
        ranks.signal(signal.SIGCONT)
    assert ranks.wait(10) == [1, 1], ranks.text()
    assert "output_dir" in ranks.text()
    assert "ended without saving" in ranks.text()
    if before is None:
        assert not folder.exists()
    else:
        after = {name: (folder / name).read_bytes() for name in os.listdir(folder) if (folder / name).is_file()}
        assert after == before
        assert [path.name for path in (folder / "logs").iterdir()] == ["rank_0.log"]
        assert not (folder / "checkpoints").exists()


def test_a_new_run_in_the_place_of_one_with_an_orphan(tiny, straight, tmp_path):
    orphan = begin(tmp_path, recipe(tiny, max_steps=100_000, save_steps=3))
    taken(tmp_path / "run", "deleted")
    new = kit.Ranks("train.py", *recipe(tiny), "--output_dir", tmp_path / "run", folder=tmp_path / "new", world=2)
    assert orphan.wait(20) == [1, 1], orphan.text()
    assert new.wait() == [0, 0], new.text()
    assert kit.timeless(tmp_path / "run") == kit.timeless(straight.folder)
    assert kit.same(kit.Run(tmp_path / "run").weights, straight.weights)


def test_a_deleted_lock_file_is_made_and_locked_again(tiny, straight, tmp_path, monkeypatch):
    monkeypatch.setattr(run_status, "lock_run_folder", partial(run_status.lock_run_folder, patience=0.5))
    ranks = begin(tmp_path, recipe(tiny, max_steps=100_000), world=1)
    lock = tmp_path / "run" / "logs" / "rank_0.log"
    lock.unlink()
    kit.until(lock.exists, 5)
    second = kit.Ranks("train.py", *recipe(tiny), "--output_dir", tmp_path / "run", folder=tmp_path / "new")
    assert second.wait(20) == [2], second.text()
    ranks.signal(signal.SIGTERM)
    check_stopped(ranks, tmp_path / "run")


# ---- real launches --------------------------------------------------------------------------------------------------------


class Launched:
    """A real launch in a process group of its own, with its output in a file."""

    def __init__(self, folder: Path, *command, env=None):
        self.folder, self.output = folder / "run", folder / "output.txt"
        self.process = subprocess.Popen(
            [str(word) for word in command],
            cwd=kit.REPOSITORY,
            env=PLAIN | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"} | (env or {}),
            stdout=self.output.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def trained(self, steps: int) -> "Launched":
        """Return when so many steps are trained."""
        kit.until(lambda: self.process.poll() is not None or kit.last_step(self.folder) >= steps)
        assert self.process.poll() is None, self.output.read_text()
        return self

    def workers(self) -> list[int]:
        """Return the processes that train: those that hold the log files of the ranks, by rank."""
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                held = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
            except OSError:
                continue
            for name in held:
                if match := re.fullmatch(re.escape(str(self.folder)) + r"/logs/rank_(\d+)\.log", name):
                    found[int(match[1])] = int(pid)
        return [found[rank] for rank in sorted(found)]


@pytest.fixture(scope="module")
def slow(tiny, tmp_path_factory) -> dict:
    """As `tiny`, with a model whose steps take longer: signals must not come after its end."""
    return tiny | {"max_steps": 400, "save_steps": 20, "logging_steps": 1}


@pytest.fixture(scope="module")
def undisturbed(slow, tmp_path_factory) -> kit.Run:
    return kit.run_training(2, tmp_path_factory.mktemp("undisturbed") / "run", *recipe(slow, **slow))


def test_torchrun_is_told_to_stop_then_loses_a_worker_and_then_heals(slow, undisturbed, tmp_path):
    """Three launches of one run on two processes. SIGTERM to the launcher: saved. SIGKILL of a worker without restarts:
    the job ends within 60 s, non-zero. With --max_restarts 2: it heals by itself, and nothing shows in what it comes to."""
    folder = tmp_path / "run"
    command = [kit.REPOSITORY / "train.py", *recipe(slow, **slow | {"output_dir": folder})]

    one = Launched(tmp_path, *TORCHRUN, *command).trained(30)
    one.process.terminate()
    assert one.process.wait(60) != 0
    told = run_status.read_status(folder)
    assert (told["status"], told["exit_code"]) == ("stopped", 75), one.output.read_text()
    assert told["step"] == kit.last_step(folder) == checkpoint_list.step_of(checkpoint_list.newest_intact(folder))
    assert code_of(folder) == 75

    two = Launched(tmp_path, *TORCHRUN, *command).trained(told["step"] + 30)
    os.kill(two.workers()[1], signal.SIGKILL)
    assert two.process.wait(60) != 0
    assert run_status.read_status(folder)["status"] == "failed"

    three = Launched(tmp_path, *TORCHRUN, "--max_restarts", "2", *command).trained(kit.last_step(folder) + 30)
    os.kill(three.workers()[0], signal.SIGKILL)
    assert three.process.wait(120) == 0, three.output.read_text()
    assert kit.same(kit.Run(folder).weights, undisturbed.weights)
    assert kit.timeless(folder) == kit.timeless(undisturbed.folder)
    assert run_status.read_status(folder)["status"] == "complete"


def test_a_worker_that_was_told_to_stop_is_not_started_again(slow, tmp_path):
    """torchrun --max_restarts takes exit code 75 for a failure; the run that it starts again sees that it was stopped."""
    folder = tmp_path / "run"
    command = [kit.REPOSITORY / "train.py", *recipe(slow, **slow | {"output_dir": folder})]
    run = Launched(tmp_path, *TORCHRUN, "--max_restarts", "1", *command).trained(30)
    os.kill(run.workers()[1], signal.SIGUSR1)
    assert run.process.wait(60) != 0
    told = run_status.read_status(folder)
    assert (told["status"], told["exit_code"]) == ("stopped", 75), run.output.read_text()
    assert told["step"] == kit.last_step(folder) == checkpoint_list.step_of(checkpoint_list.newest_intact(folder))
    assert run.output.read_text().count("saving after this step") == 1


def test_accelerate_launch_leaves_its_child_which_saves_and_ends(slow, tmp_path):
    """With one process it dies of SIGTERM at once, and passes nothing on."""
    folder = tmp_path / "run"
    where = kit.REPOSITORY / "accelerate_configs" / "cpu.yaml"
    command = [kit.REPOSITORY / "train.py", *recipe(slow, **slow | {"output_dir": folder, "max_steps": 100_000})]
    run = Launched(tmp_path, *ACCELERATE, where, *command).trained(30)
    run.process.terminate()
    assert run.process.wait(10) == -signal.SIGTERM
    kit.until(lambda: run_status.read_status(folder)["status"] == "stopped", 15)
    told = run_status.read_status(folder)
    assert told["reason"].startswith("Stopped by the end of the launcher")
    assert told["step"] == kit.last_step(folder) == checkpoint_list.step_of(checkpoint_list.newest_intact(folder))
    kit.until(lambda: not run.workers(), 15)


def test_make_train_tells_stopped_from_failed(slow, tmp_path):
    """`Error 75`, whatever the launcher makes of it."""
    fields = {name: str(value) for name, value in slow.items()} | {"max_steps": 100_000}
    run_file = kit.write_yaml(tmp_path / "run.yaml", fields)
    (tmp_path / "run").mkdir()
    make = ["make", "-o", ".venv/done", "train", f"CONFIG={run_file}", f"OUT={tmp_path / 'run'}"]
    run = Launched(tmp_path, *make).trained(30)
    os.kill(run.workers()[0], signal.SIGTERM)
    assert run.process.wait(60) == 2
    assert re.search(r"make(\[\d+\])?: \*\*\* \[Makefile:\d+: train\] Error 75", run.output.read_text()), (
        run.output.read_text()
    )
