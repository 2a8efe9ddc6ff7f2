"""--dry_run builds the model as the run file says, without a process group, and without memory for a large model."""

from pathlib import Path

import pytest

import train
from src.config.errors import UsageError
from tests.helpers import plain_task


def dry_run(plain: dict, **fields) -> None:
    """Run train.py --dry_run in this process."""
    train.main([str(word) for word in plain_task.flags(plain, dry_run=True, **fields)])


def test_plan_counts_what_is_trained_of_a_model_without_weights(plain, monkeypatch, tmp_path, capsys):
    """`build` is asked for an empty model only, so billions of parameters need no memory."""
    asked, build = [], plain_task.Task.build
    monkeypatch.setattr(
        plain_task.Task, "build", lambda task, weights=None, empty=False: asked.append(empty) or build(task, None, True)
    )
    dry_run(plain, output_dir=tmp_path / "run", freeze=["enter.*", "leave.weight"])
    assert asked == [True]
    assert "1,436 (1,100 trainable) in float64" in capsys.readouterr().out
    with pytest.raises(UsageError, match="freeze: nope"):
        dry_run(plain, output_dir=tmp_path / "run", freeze=["nope"])


@pytest.mark.parametrize("size, warmup, warned", [(8, 50, True), (1, 2, False)])
def test_few_steps_are_warned_of(plain, tmp_path, capsys, size, warmup, warned):
    few = {"max_steps": "none", "global_batch_size": size, "per_device_batch_size": 1, "warmup_steps": warmup}
    rows = tmp_path / "few.jsonl"
    rows.write_text("".join(Path(plain["train_file"]).read_text().splitlines(keepends=True)[:20]))
    dry_run(plain, **few, train_file=rows, output_dir=tmp_path / "run")
    printed = capsys.readouterr().out
    assert ("an epoch has only 3 steps of up to 8 examples" in printed) == warned
    assert ("fills all" in printed) == warned
