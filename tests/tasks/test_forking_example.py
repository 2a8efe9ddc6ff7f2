"""The code that docs/forking.md shows, as it stands there: tasks, edits of train.py, removed add-ons."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from src.config import parsing
from src.config.errors import UsageError
from src.data.dataset import prepare_datasets
from src.tasks import OPTIONS, make_task
from tests.conformance import checks
from tests.conformance.test_task import make_flags
from tests.helpers import kit, plain_task

PAGE = (kit.REPOSITORY / "docs" / "forking.md").read_text()


def blocks(section: str, language: str) -> list[str]:
    """Return the blocks of code in a section of the page."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0], re.S)


def test_whole_task_of_a_plain_module(tmp_path, monkeypatch):
    """It passes the checks of the suite, and does not depend on the split."""
    example, recipe = blocks("A model of your own", "python")
    assert len(example.splitlines()) <= 75
    file = tmp_path / "forecasting.py"
    file.write_text(example)
    spec = importlib.util.spec_from_file_location("src.tasks.forecasting", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look it up
    spec.loader.exec_module(module)
    exec(recipe, names := {"np": np, "kit": kit})
    with plain_task.registered(module, "forecasting"):
        check_forecasting(make_flags(names["forecasting"], tmp_path), tmp_path)


def check_forecasting(flags, tmp_path):
    cfg, options = parsing.parse(flags, OPTIONS)
    task = make_task(cfg, options)
    rows = prepare_datasets(cfg, task)["train"].rows(np.arange(checks.ROWS))
    checks.check_evaluation_is_not_random(task, rows)
    checks.check_rows_are_independent(task, task.build(), rows, training=False)
    with pytest.raises(UsageError, match="here: 3 values"):
        task.encode({"values": [[1.0, 2.0, 3.0]]}, ["here"])
    one = kit.run_training(1, tmp_path / "one", *flags)
    log = (one.folder / "logs" / "rank_0.log").read_text()
    assert " rows/s ETA" in log
    assert "203 rows, 1,218 targets" in log
    two = kit.run_training(2, tmp_path / "two", *flags, "--per_device_batch_size", 5)
    assert kit.distance(one.weights, two.weights) <= 1e-10
    assert two.kind("eval")[-1]["mae"] == pytest.approx(one.kind("eval")[-1]["mae"], rel=1e-12)
    assert kit.run_evaluation(1, tmp_path / "eval", "--checkpoint", one.folder) == one.kind("eval")[-1]


def test_changed_loss_new_number_and_removed_addons(tmp_path):
    """In a copy of the repository."""
    copy = shutil.copytree(
        kit.REPOSITORY, tmp_path / "copy", ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"), symlinks=True
    )
    (commands,) = blocks("Remove a feature", "bash")
    (code,), (edit,) = blocks("A changed loss", "python"), blocks("A new number in the log", "diff")
    subprocess.run(["git", "apply", "-"], cwd=copy, input=edit, text=True, check=True)
    (copy / "src" / "tasks" / "calm_lm.py").write_text(code)
    env = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}", "ACCELERATE_USE_CPU": "true"}
    if all((copy / path).exists() for path in re.findall(r"addons/\S+", commands)):  # not in each fork
        subprocess.run(["bash", "-ec", commands], cwd=copy, env=env, check=True)
        fields = json.loads((copy / "configs" / "schema.json").read_text())["properties"]
        assert "embeddings" not in fields["task"]["enum"]
        assert "calm_lm" in fields["task"]["enum"]
    argv = kit.flags(task="calm_lm", **kit.tiny_files(copy), max_steps=2, logging_steps=1, output_dir="run")
    subprocess.run([sys.executable, "train.py", *argv], cwd=copy, env=env, check=True, timeout=300)
    first, second = kit.Run(copy / "run").kind("train")
    for line in (first, second):
        assert 0 < line["entropy"] <= np.log(50)
        assert line["clipped"] == (line["grad_norm"] > 1)
