"""Trackers: they get every line of a start; a failing or hanging tracker is a warning."""

import json
import signal
import sys
import time

import pytest
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, register_tracker_class

from engine.config.run_config import RunConfig
from engine.run import trackers
from tests.helpers import kit
from tests.helpers.killing import train_until_killed
from tests.helpers.stopping import begin, check_stopped, recipe


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


@pytest.fixture(autouse=True)
def registered():
    """Register Good, and trackers that hang or raise at the start, at a line, or at the end, for forked runs, too."""
    before = dict(LOGGER_TYPE_TO_CLASS)
    register_tracker_class(Good)
    for when, method in {"start": "start", "log": "log", "end": "finish"}.items():
        for what, act in (("hangs", _forever), ("raises", _raise)):
            fields = {"name": f"{what}_in_{when}", "requires_logging_directory": False, "tracker": None, method: act}
            fields["__init__"] = lambda self, project: GeneralTracker.__init__(self)
            register_tracker_class(type(fields["name"], (GeneralTracker,), fields))
    yield
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(before)


def read(file) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def expected(folder) -> list[tuple]:
    return [(line["step"], line["kind"], line["loss"]) for line in read(folder / "metrics.jsonl")]


def losses(lines) -> list[tuple]:
    pairs = [(line, "eval" if "eval/loss" in line else "train") for line in lines if "step" in line]
    return [(line["step"], kind, line[f"{kind}/loss"]) for line, kind in pairs]


@pytest.mark.parametrize("when, received", [("start", 0), ("log", 1), ("end", 5)])
def test_hanging_and_failing_trackers_are_warnings(tiny, tmp_path, monkeypatch, when, received):
    """A tracker that raises does not disturb the others; one that hangs stops them, but never the run."""
    monkeypatch.setattr(trackers, "TIMEOUT", 5.0)
    names = [f"raises_in_{when}", "good", f"hangs_in_{when}"]
    ranks = kit.Ranks("train.py", *recipe(tiny, max_steps=3, eval_steps=2, report_to=names), folder=tmp_path)
    codes, text, folder = ranks.wait(), ranks.text(), tmp_path / "run"
    assert codes == [0], text
    assert (folder / "final" / "config.json").exists()
    assert len(expected(folder)) == 5
    lines = read(folder / "trackers.jsonl")
    assert losses(lines) == expected(folder)[:received]
    assert lines[0] == {"project": kit.REPOSITORY.name}
    assert f"warning: report_to: raises_in_{when} failed (ConnectionError: no server)" in text
    assert f"warning: report_to: hangs_in_{when} has not closed in time" in text
    assert (f"hangs_in_{when} has not started in 5 s" in text) == (when == "start")


def test_end_of_a_run_closes_trackers(tiny, tmp_path):
    ranks = begin(tmp_path, recipe(tiny, report_to="good"))
    ranks.signal(signal.SIGTERM)
    check_stopped(ranks, tmp_path / "run")
    lines = read(tmp_path / "run" / "trackers.jsonl")
    assert losses(lines) == expected(tmp_path / "run") != []
    assert lines[-1] == {"finished": True}


def test_command_line_is_not_uploaded_and_stdin_is_restored(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--train_file", "https://host/x?signature=secret"])
    terminal, cfg = sys.stdin, RunConfig(output_dir=str(tmp_path), report_to=["good"], project="p")
    accelerator = Accelerator(cpu=True, log_with=["good"], project_dir=tmp_path)
    one = trackers.Trackers(accelerator, cfg, 0, 1)
    assert sys.argv[1:]  # nothing has begun
    one.start()
    assert sys.argv == ["train.py"]
    assert sys.stdin is terminal
    one.add({"kind": "train", "step": 1, "loss": 2.0, "accuracy": None})
    assert one.close()
    assert one.close()  # the end of a process may call it again
    assert read(tmp_path / "trackers.jsonl") == [{"project": "p"}, {"train/loss": 2.0, "step": 1}, {"finished": True}]


def test_only_a_resumed_run_keeps_its_id_and_wandb_variables_win(tmp_path, monkeypatch):
    def options(step: int, tracker: str) -> dict:
        return trackers.tracker_options(RunConfig(output_dir=str(tmp_path)), step)[tracker]

    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    first, resumed, second = options(0, "wandb"), options(10, "wandb"), options(0, "wandb")
    assert first == resumed
    assert second["id"] != first["id"]
    assert options(10, "tensorboard") == {"purge_step": 11}  # steps after the checkpoint come again
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    assert options(10, "wandb")["id"] == "mine"


@pytest.mark.cluster
def test_killed_and_resumed_run_is_one_run_of_wandb_and_tensorboard(tiny, tmp_path, monkeypatch):
    """The real wandb (offline); each point of TensorBoard is there once."""
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", "")
    folder, values = tmp_path / "run", {"max_steps": 9, "save_steps": 3, "eval_steps": 3, "logging_steps": 1}
    flags = [*kit.flags(**tiny, **values, project="pears"), "--report_to", "wandb", "tensorboard"]
    train_until_killed(5, 1, folder, *flags)
    run = kit.run_training(1, folder, *flags)
    run_id = json.loads((folder / "trackers.json").read_text())["run_id"]
    assert len(list(folder.glob(f"wandb/*run-*/*{run_id}.wandb"))) == 2  # one file for each start, of the same run
    points = EventAccumulator(str(folder / "trackers" / "pears"))
    points.Reload()
    for kind in ("train", "eval"):
        assert [event.step for event in points.Scalars(f"{kind}/loss")] == [line["step"] for line in run.kind(kind)]


class WithTables:
    """A tracker with tables, as accelerate's of wandb has them."""

    name = "wandb"

    def __init__(self):
        self.tables = []

    def log_table(self, table_name, columns=None, data=None, dataframe=None, step=None, **_):
        self.tables.append((table_name, columns, data, step))


def test_samples_are_a_table_where_a_tracker_has_tables(tmp_path):
    tracker = WithTables()
    trackers.log_samples(tracker, [("one", "cat")], 3)
    assert tracker.tables == [("samples", ["prompt", "answer"], [["one", "cat"]], 3)]
    trackers.log_samples(Good("project", tmp_path / "folder"), [("one", "cat")], 3)  # it has none
    assert not (tmp_path / "folder.jsonl").exists()
