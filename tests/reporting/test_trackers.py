"""Trackers: they get every line of a start; a failing or hanging tracker is a warning."""

import json
import os
import signal
import sys
import threading
import time

import pytest
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, register_tracker_class

from src.config.schema import RunConfig
from src.distributed import stop_signals
from src.reporting import trackers
from tests.helpers import kit
from tests.helpers.killing import train_until_killed


class Good(GeneralTracker):
    """Writes what it gets to a file, slowly, like a server."""

    name, requires_logging_directory, main_process_only = "good", True, False
    tracker = None

    def __init__(self, project, folder):
        super().__init__()
        self.project, self.file = project, f"{folder}.jsonl"

    def start(self):
        self._write({"project": self.project})

    def log(self, values, step=None, **_):
        time.sleep(0.02)
        self._write(values | {"step": step})

    def finish(self):
        time.sleep(0.2)
        self._write({"finished": True})

    def _write(self, values):
        with open(self.file, "a") as file:
            file.write(json.dumps(values) + "\n")


def _forever(*args, **kwargs):
    time.sleep(1000)


def _raise(*args, **kwargs):
    raise ConnectionError("no server")


def _register():
    register_tracker_class(Good)
    for when, method in {"start": "start", "log": "log", "end": "finish"}.items():
        for what, act in (("hangs", _forever), ("raises", _raise)):
            fields = {"name": f"{what}_in_{when}", "requires_logging_directory": False, "tracker": None, method: act}
            fields["__init__"] = lambda self, project: GeneralTracker.__init__(self)
            register_tracker_class(type(fields["name"], (GeneralTracker,), fields))


@pytest.fixture
def registered():
    before = dict(LOGGER_TYPE_TO_CLASS)
    yield _register()
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(before)


def read(file) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def expected(folder) -> list[tuple]:
    return [(line["step"], line["kind"], line["loss"]) for line in read(folder / "metrics.jsonl")]


def losses(lines) -> list[tuple]:
    pairs = [(line, "eval" if "eval/loss" in line else "train") for line in lines if "step" in line]
    return [(line["step"], kind, line[f"{kind}/loss"]) for line, kind in pairs]


def flags(files, **values):
    values = {"model_config": files / "llama.yaml", "report_to": "good", "logging_steps": 1, "eval_steps": 2} | values
    values |= {f"{split}_file": files / f"{split}.jsonl" for split in ("train", "validation")}
    return kit.flags(**values | {"max_eval_examples": 8, "global_batch_size": 8})


def _fail():
    raise ZeroDivisionError("in the middle")


def send_here(number: int) -> None:
    """Send a signal to this process; return when the thread that receives it has handled it."""
    handle, handled = stop_signals.StopSignals._handle, threading.Event()

    def handle_and_tell(self, *args):
        handle(self, *args)
        handled.set()

    stop_signals.StopSignals._handle = handle_and_tell
    os.kill(os.getpid(), number)
    assert handled.wait(300)
    stop_signals.StopSignals._handle = handle


def _train(argv, folder, timeout, rank=None, act=_fail):
    """Run train.py with the trackers of this file; one `rank` calls `act()` in step 4."""
    import train

    _register()
    trackers.TIMEOUT = timeout
    if os.environ["RANK"] == str(rank):
        original, calls = train.optimizer_step, []

        def update(*args):
            calls.append(1)
            if len(calls) == 4:
                act()
            return original(*args)

        train.optimizer_step = update
    kit._command("train.py", argv, folder)


def started(files, folder, *at_step_4, timeout=100.0, world=1, **values) -> list:
    """Start a run; return its processes."""
    folder.mkdir()
    argv = flags(files, output_dir="run", **values)
    return kit.fork(world, _train, argv, folder, timeout, *at_step_4, out=folder / "out")


def ended(folder, ranks) -> tuple[list[int], str]:
    """Wait for the end of a run; return its exit codes, and the output of the main process."""
    for process in ranks:
        process.join(600)  # not the 1000 s of a hanging call
        process.kill()
    return [process.exitcode for process in ranks], (folder / "out" / "rank0.txt").read_text()


def test_hanging_and_failing_trackers_are_warnings(files, tmp_path, registered):
    """A tracker that raises does not disturb the others; one that hangs stops them, but never the run."""
    names = {when: [f"raises_in_{when}", "good", f"hangs_in_{when}"] for when in ("start", "log", "end")}
    fields = {"timeout": 10.0, "max_steps": 3}
    runs = {when: started(files, tmp_path / when, report_to=names[when], **fields) for when in names}
    for (when, ranks), lines_received in zip(runs.items(), (0, 1, 5), strict=True):
        codes, text = ended(tmp_path / when, ranks)
        folder = tmp_path / when / "run"
        assert codes == [0], text
        assert (folder / "final" / "config.json").exists()
        lines = read(folder / "trackers.jsonl")
        assert len(expected(folder)) == 5
        assert losses(lines) == expected(folder)[:lines_received]
        assert lines[0] == {"project": kit.REPOSITORY.name}
        assert f"warning: report_to: raises_in_{when} failed (ConnectionError: no server)" in text
        assert f"warning: report_to: hangs_in_{when} has not closed in time" in text
        assert (f"hangs_in_{when} has not started in 10 s" in text) == (when == "start")
        assert "good" not in text


ENDS = {"SIGTERM": (75, (1, lambda: send_here(signal.SIGTERM))), "rank 0 fails": (1, (0,))}  # by what happens in step 4


def test_every_end_of_a_run_closes_trackers(files, tmp_path):
    runs = {end: started(files, tmp_path / end, *ENDS[end][1], world=2, max_steps=6) for end in ENDS}
    for end, ranks in runs.items():
        codes, text = ended(tmp_path / end, ranks)
        assert codes == [ENDS[end][0]] * 2, text
        lines = read(tmp_path / end / "run" / "trackers.jsonl")
        assert losses(lines) == expected(tmp_path / end / "run") != []
        assert lines[-1] == {"finished": True}
        assert "report_to" not in text


def test_command_line_is_not_uploaded_and_stdin_is_restored(tmp_path, registered, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--train_file", "https://host/x?signature=secret"])
    terminal, cfg = sys.stdin, RunConfig(output_dir=str(tmp_path), report_to=["good"], project="p")
    accelerator = Accelerator(cpu=True, log_with=["good"], project_dir=tmp_path)
    one = trackers.Trackers(accelerator, cfg, 0)
    assert sys.argv == ["train.py"]
    assert sys.stdin is terminal
    one.add({"kind": "train", "step": 1, "loss": 2.0, "accuracy": None})
    assert one.close()
    assert one.close()  # the end of a process may call it again
    assert read(tmp_path / "trackers.jsonl") == [{"project": "p"}, {"train/loss": 2.0, "step": 1}, {"finished": True}]


def test_only_a_resumed_run_keeps_its_id_and_wandb_variables_win(tmp_path, monkeypatch):
    names = {"NAME": "name", "RUN_ID": "id", "RESUME": "resume", "DIR": "dir"}
    for variable in names:
        monkeypatch.delenv(f"WANDB_{variable}", raising=False)

    def options(step: int) -> dict:
        return trackers.tracker_options(RunConfig(output_dir=str(tmp_path)), step)["wandb"]

    first, resumed, second = options(0), options(10), options(0)
    assert first == resumed == {"name": tmp_path.name, "id": first["id"], "resume": "allow", "dir": str(tmp_path)}
    assert second["id"] != first["id"]
    for variable in names:
        monkeypatch.setenv(f"WANDB_{variable}", variable)
    assert options(0) == {option: variable for variable, option in names.items()}


@pytest.mark.cluster
def test_killed_and_resumed_run_is_one_run_of_wandb_and_tensorboard(files, tmp_path, monkeypatch):
    """The real wandb (offline); each point of TensorBoard is there once."""
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", "")
    folder = tmp_path / "run"
    argv = flags(files, report_to=["wandb", "tensorboard"], max_steps=9, save_steps=3, project="pears")
    train_until_killed(5, 1, folder, *argv)
    kit.run_training(1, folder, *argv)
    run_id = json.loads((folder / "trackers.json").read_text())["run_id"]
    assert len(list(folder.glob(f"wandb/*run-*/*{run_id}.wandb"))) == 2  # one file for each start, of the same run
    points = EventAccumulator(str(folder / "trackers" / "pears"))
    points.Reload()
    for kind in ("train", "eval"):
        steps = [(event.step, kind) for event in points.Scalars(f"{kind}/loss")]
        assert steps == [(step, name) for step, name, _ in expected(folder) if name == kind]
