"""The real wandb (offline) and TensorBoard: one run has every line after a stop, and no point twice after a kill."""

import json
import signal
import struct
from pathlib import Path

import pytest

from tests.helpers import kit
from tests.reporting.test_trackers import expected, flags

pytestmark = pytest.mark.cluster

BLOCK = 32_768  # bytes; wandb's files are LevelDB logs with a header of seven bytes


def records(file: Path):
    """Yield the records of a .wandb file."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts, at = parts + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def rows(files) -> tuple[set, set]:
    """Return (id, project, name) of all runs, and (step, kind, loss) of all rows."""
    runs, found = set(), set()
    for record in (record for file in files for record in records(file)):
        if record.HasField("run"):
            runs.add((record.run.run_id, record.run.project, record.run.display_name))
        items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for kind in ("train", "eval"):
            if f"{kind}/loss" in items:
                found.add((items["_step"], kind, items[f"{kind}/loss"]))
    return runs, found


def services() -> set[int]:
    """Return the ids of running wandb processes."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        found |= {int(path.parent.name)} if b"wandb-core" in words else set()
    return found


def test_wandb_has_every_line_of_a_stopped_and_resumed_run(files, tmp_path):
    pytest.importorskip("wandb")
    env = {"WANDB_MODE": "offline", "WANDB_PROJECT": "apples", "WANDB_DIR": ""}
    folder, before, loader = tmp_path / "all" / "run", services(), tmp_path / "all"
    argv = flags(files, report_to="wandb", max_steps=100, save_steps=20, eval_steps=10, save_total_limit=1)

    def files_of() -> list[Path]:
        return sorted(folder.glob("wandb/*run-*/*.wandb"))

    stopped = kit.Ranks("train.py", *argv, folder=loader, env=env)
    kit.until(lambda: kit.last_step(folder) >= 30 or stopped.processes[0].exitcode is not None)
    stopped.signal(signal.SIGTERM)
    assert stopped.wait() == [75], stopped.text()
    [file] = files_of()
    assert rows([file])[1] == set(expected(folder))

    ended = kit.Ranks("train.py", *argv, folder=loader, env=env)
    assert ended.wait() == [0], ended.text()
    found, lines = rows(files_of())
    assert lines == set(expected(folder))
    assert len(lines) == 110
    assert found == {(json.loads((folder / "trackers.json").read_text())["run_id"], "apples", "run")}
    assert len(files_of()) == 2
    kit.until(lambda: services() <= before)
    assert not (loader / "wandb").exists()
    assert "wandb:" not in ended.text()
    uploaded = [record.environment for file in files_of() for record in records(file) if record.HasField("environment")]
    assert uploaded
    assert not [one for one in uploaded if "--train_file" in str(one)]


def test_tensorboard_has_each_point_once_after_a_kill(files, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "all" / "run"
    argv = flags(files, report_to="tensorboard", max_steps=100, save_steps=20, eval_steps=10, project="pears")
    killed = kit.Ranks("train.py", *argv, folder=tmp_path / "all")
    kit.until(lambda: kit.last_step(folder) >= 35)
    killed.signal(signal.SIGKILL)
    killed.wait()
    ended = kit.Ranks("train.py", *argv, folder=tmp_path / "all")
    assert ended.wait() == [0], ended.text()
    points = EventAccumulator(str(folder / "trackers" / "pears"))
    points.Reload()
    for kind in ("train", "eval"):
        found = [(event.step, kind) for event in points.Scalars(f"{kind}/loss")]
        assert found == [(step, one) for step, one, _ in expected(folder) if one == kind]
