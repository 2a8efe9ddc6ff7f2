"""Trackers: every line of a run under one id; a failing or hanging tracker is a warning."""

import json
import signal
import sys
import time
from types import SimpleNamespace

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, register_tracker_class

from src.config.schema import RunConfig
from src.reporting import trackers
from tests.helpers import kit
from tests.helpers.stopping import send_here


class Good(GeneralTracker):
    """Writes what it gets to a file, slowly, like a server."""

    name, requires_logging_directory, main_process_only = "good", True, False

    def __init__(self, project, folder):
        super().__init__()
        self.project, self.file = project, f"{folder}.jsonl"

    tracker = None

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
    bad = {
        "hangs_in_start": {"start": _forever},
        "hangs_in_log": {"log": _forever},
        "hangs_at_end": {"finish": _forever},
    }
    bad |= {"raises_in_start": {"start": _raise}, "raises_in_log": {"log": _raise}}
    register_tracker_class(Good)
    for name, methods in bad.items():
        fields = {"name": name, "requires_logging_directory": False, "tracker": None}
        fields["__init__"] = lambda self, project: GeneralTracker.__init__(self)
        register_tracker_class(type(name, (GeneralTracker,), fields | methods))
    return list(bad)


@pytest.fixture
def registered():
    before = dict(LOGGER_TYPE_TO_CLASS)
    yield _register()
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(before)
    trackers._threads.clear()
    trackers._close_deadlines.clear()


def received(folder) -> list[dict]:
    file = folder / "trackers.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def expected(folder) -> list[tuple]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["kind"], line["loss"]) for line in lines]


def losses(lines) -> list[tuple]:
    found = [(line, "eval" if "eval/loss" in line else "train") for line in lines if "step" in line]
    return [(line["step"], kind, line[f"{kind}/loss"]) for line, kind in found]


def flags(files, **values):
    values = {
        "model_config": files / "llama.yaml",
        "train_file": files / "train.jsonl",
        "validation_file": files / "validation.jsonl",
        "max_eval_examples": 8,
        "global_batch_size": 8,
        "logging_steps": 1,
        "eval_steps": 2,
        "report_to": "good",
        "output_dir": "run",
    } | values
    return kit.flags(**values)


def _fail():
    raise ZeroDivisionError("in the middle")


def _train(argv, folder, timeout, rank=None, act=_fail):
    """Run train.py with the trackers of this file; one `rank` calls `act()` in step 4."""
    import os

    import train

    _register()
    trackers.START_TIMEOUT = trackers.CLOSE_TIMEOUT = timeout
    if os.environ["RANK"] == str(rank):
        original, calls = train.optimizer_step, []

        def update(*args):
            calls.append(1)
            if len(calls) == 4:
                act()
            return original(*args)

        train.optimizer_step = update
    kit._command("train.py", argv, folder)


def run(files, folder, *at_step_4, timeout=100.0, world=1, **values):
    """Return the exit codes of a run, and the output of the main process."""
    folder.mkdir()
    argv, out = flags(files, **values), folder / "out"
    ranks = kit.fork(world, _train, argv, folder, timeout, *at_step_4, out=out)
    for process in ranks:
        process.join(180)
        process.kill()
    return [process.exitcode for process in ranks], (out / "rank0.txt").read_text()


def test_hanging_and_failing_trackers_are_warnings(files, tmp_path, registered):
    names = [*registered, "good"]
    codes, text = run(files, tmp_path / "all", timeout=4.0, max_steps=3, report_to=names)
    assert codes == [0], text
    folder = tmp_path / "all" / "run"
    assert (folder / "final" / "config.json").exists()
    assert json.loads((folder / "status.json").read_text())["status"] == "complete"
    lines = received(folder)
    assert losses(lines) == expected(folder)
    assert len(expected(folder)) == 5
    assert lines[0] == {"project": kit.REPOSITORY.name}
    assert lines[-1] == {"finished": True}
    for name in registered:
        assert f"warning: report_to: {name} " in text
    assert "hangs_in_log has not logged 5 of 5 lines" in text
    assert "good" not in text


ENDS = {  # name: (exit code, rank and what it does in step 4)
    "complete": (0, ()),
    "SIGTERM": (75, (1, lambda: send_here(signal.SIGTERM))),
    "rank 0 fails": (1, (0,)),
    "rank 1 fails": (1, (1,)),
}


@pytest.mark.parametrize("end", ENDS)
def test_every_end_of_a_run_closes_trackers(files, tmp_path, end):
    code, at_step_4 = ENDS[end]
    codes, text = run(files, tmp_path / "end", *at_step_4, world=2, max_steps=6)
    assert codes == [code] * 2, text
    folder = tmp_path / "end" / "run"
    assert losses(received(folder)) == expected(folder) != []
    assert received(folder)[-1] == {"finished": True}
    assert "report_to" not in text


def start(folder, config="a: 1", step=0, lines=()):
    """Start the good tracker in this process, as train.py does; return trackers.json."""
    folder.mkdir(exist_ok=True)
    run = RunConfig(output_dir=str(folder), report_to=["good"], project="p/q")
    trackers.start(SimpleNamespace(log_with=["good"], trackers=[]), run, config, step, list(lines))
    return json.loads((folder / "trackers.json").read_text())


def line(step):
    return {"kind": "train", "step": step, "loss": float(step)}


def test_resume_sends_lines_that_a_tracker_may_lack(tmp_path, registered, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--train_file", "https://host/x?signature=secret"])
    first = start(tmp_path / "run")
    assert sys.argv == ["train.py"]
    for step in (1, 2):
        trackers.add(line(step))
    assert trackers.close()
    assert start(tmp_path / "run", "a: 2", 2, map(line, (1, 2)))["run_id"] == first["run_id"]
    trackers.add(line(3))
    trackers._threads[0].queue.put(None)  # as after a kill, trackers.json does not have step 3
    trackers._threads[0].thread.join()
    (tmp_path / "run" / "trackers.json").write_text(json.dumps(first | {"complete": {"good": 2}}))
    start(tmp_path / "run", "a: 2", 4, map(line, (1, 2, 3, 4)))
    assert trackers.close()
    assert [step for step, *_ in losses(received(tmp_path / "run"))] == [1, 2, 3, 3, 4]
    assert json.loads((tmp_path / "run" / "trackers.json").read_text())["complete"] == {"good": 4}
    assert start(tmp_path / "run", "a: 2", 3)["complete"] == {"good": 3}  # from an older checkpoint: step 4 comes again


def test_only_a_new_run_gets_a_new_id(tmp_path):
    first = trackers._run_identity(tmp_path, "a: 1", 0)["run_id"]
    assert trackers._run_identity(tmp_path, "a: 1", 0)["run_id"] == first  # killed before its first checkpoint
    assert trackers._run_identity(tmp_path, "a: 2", 10)["run_id"] == first  # resumed, with another flag
    second = trackers._run_identity(tmp_path, "a: 3", 0)["run_id"]
    assert second != first
    (tmp_path / "trackers.json").write_text("[]")
    assert trackers._run_identity(tmp_path, "a: 3", 10)["run_id"] not in (first, second)


def test_wandb_variables_win_over_our_defaults(tmp_path, monkeypatch):
    run, folder = RunConfig(output_dir=str(tmp_path / "x")), tmp_path / "x"
    keywords = trackers._settings(run, folder, "id")["wandb"]
    assert keywords == {"name": "x", "id": "id", "resume": "allow", "dir": str(folder)}
    for name in ("NAME", "RUN_ID", "RESUME", "DIR"):
        monkeypatch.setenv(f"WANDB_{name}", "theirs")
    assert trackers._settings(run, folder, "id")["wandb"] == {}
    run.run_name = "mine"
    assert trackers._settings(run, folder, "id")["wandb"] == {"name": "mine"}
