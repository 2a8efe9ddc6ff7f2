"""The real wandb (offline) and TensorBoard: one run over a kill and a resume, with each point of TensorBoard once."""

import json

import pytest

from tests.helpers import kit
from tests.helpers.killing import train_until_killed
from tests.reporting.test_trackers import expected, flags

pytestmark = pytest.mark.cluster


def test_killed_and_resumed_run_is_one_run(files, tmp_path):
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": ""}.items():
            patch.setenv(name, value)
        folder = tmp_path / "run"
        argv = flags(files, report_to=["wandb", "tensorboard"], max_steps=9, save_steps=3, project="pears")
        argv = argv[: argv.index("--output_dir")] + argv[argv.index("--output_dir") + 2 :]
        train_until_killed(5, 1, folder, *argv)
        kit.run_training(1, folder, *argv)
    run_id = json.loads((folder / "trackers.json").read_text())["run_id"]
    assert len(list(folder.glob(f"wandb/*run-*/*{run_id}.wandb"))) == 2  # one file for each start, of the same run
    points = EventAccumulator(str(folder / "trackers" / "pears"))
    points.Reload()
    for kind in ("train", "eval"):
        steps = [(event.step, kind) for event in points.Scalars(f"{kind}/loss")]
        assert steps == [(step, name) for step, name, _ in expected(folder) if name == kind]
