"""The code that docs/forking.md shows, as it stands there: tasks, edits of train.py, removed add-ons."""

import importlib.util
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import types
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from engine.config import parsing
from engine.config.errors import UsageError
from engine.find_tasks import OPTIONS, make_task
from engine.plan.dataset import prepare_datasets
from tests.conformance import checks, recipes, test_task
from tests.conformance.test_task import make_flags, open_task
from tests.helpers import kit, plain_task
from tests.helpers.sample_files import add_sample

PAGE = (kit.REPOSITORY / "docs" / "forking.md").read_text()


def blocks(section: str, language: str) -> list[str]:
    """Return the blocks of code in a section of the page."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0], re.S)


def task_module(name: str, code: str, folder, monkeypatch) -> types.ModuleType:
    """Return the module src.tasks.NAME with this code."""
    file = folder / f"{name}.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location(f"src.tasks.{name}", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def edited_train(folder, *edits: str):
    """Return a folder with train.py as the page's edits leave it."""
    shutil.copy(kit.REPOSITORY / "train.py", folder)
    for edit in edits:
        subprocess.run(["git", "apply", "-"], cwd=folder, input=edit, text=True, check=True)
    return folder


def _train(folder, argv):
    spec = importlib.util.spec_from_file_location("edited_train", folder / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main([str(word) for word in argv])


@pytest.fixture
def forecasting(tmp_path, monkeypatch):
    """The flags of a run of the page's plain module, and its module."""
    example, recipe = blocks("A model of your own", "python")
    assert len(example.splitlines()) <= 75
    module = task_module("forecasting", example, tmp_path, monkeypatch)
    exec(recipe, names := {"np": np, "kit": kit})
    with plain_task.registered(module, "forecasting"):
        yield make_flags(names["forecasting"], tmp_path)


def test_whole_task_of_a_plain_module(forecasting, tmp_path, monkeypatch, capsys):
    """It passes the checks of the suite; below it also runs on two processes."""
    flags = forecasting
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
    assert kit.run_evaluation(1, tmp_path / "eval", "--checkpoint", one.folder) == one.kind("eval")[-1]
    [script] = blocks("Use a run from a script", "python")
    monkeypatch.setattr(sys, "argv", ["next_values.py", str(one.folder)])
    exec(script, {})
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    model = task.build_model(str(one.folder / "final"))
    assert shown == model(torch.arange(24.0, dtype=torch.float64)[None]).tolist()


@pytest.mark.parametrize("name", ["forecasting", "gan", "calm_lm"])
def test_examples_pass_the_checks_of_the_suite(forecasting, tmp_path, monkeypatch, name):
    """Those that need no run, on the tasks as they stand on the page."""
    flags = forecasting
    if name == "gan":
        task_module(name, *blocks("Two optimizers", "python"), tmp_path, monkeypatch)
    if name == "calm_lm":
        task_module(name, blocks("A changed loss", "python")[0], tmp_path, monkeypatch)
        flags = make_flags(recipes.causal_lm, tmp_path)
    is_registered = (
        nullcontext() if name == "forecasting" else plain_task.registered(sys.modules[f"src.tasks.{name}"], name)
    )
    with is_registered:
        task, splits, model = open_task([*flags, "--task", name])
        opened = (task, splits, model, splits["train"].rows(np.arange(checks.ROWS)))
        for training in (True, False):
            test_task.test_batches_repeat_and_sums_add_up(opened, training)
        if name != "gan":  # its evaluation draws noise
            test_task.test_evaluation_is_a_function_of_the_rows(opened)
            test_task.test_loss_is_a_sum_over_independent_rows(opened)


def test_rows_from_a_database_and_computed_rows(forecasting, tmp_path, monkeypatch):
    """A row that is added to the database, or changed, makes the data again; computed rows are trained on as they are."""
    readings, waves = blocks("Rows of your own", "python")
    flags = [*forecasting, *kit.flags(max_steps=4, save_steps=2, logging_steps=1)]
    flags = [
        word for word in flags if not word.endswith(".jsonl") and word not in ("--train_file", "--validation_file")
    ]
    add_sample("readings", readings, tmp_path, monkeypatch)
    monkeypatch.setenv("READINGS", str(tmp_path / "readings.db"))
    generator = np.random.default_rng(3)
    counts = []
    with sqlite3.connect(tmp_path / "readings.db") as database:
        database.execute("create table readings (number integer primary key, series text)")
        for added in (60, 5):
            rows = [(json.dumps(generator.normal(size=30).tolist()),) for _ in range(added)]
            database.executemany("insert into readings (series) values (?)", rows)
            database.commit()
            cfg, options = parsing.parse([*flags, "--dataset_name", "readings"], OPTIONS)
            splits = prepare_datasets(cfg, make_task(cfg, options))
            counts.append([len(splits[name]) for name in ("train", "validation")])
        database.execute("update readings set series = ? where number = 1", (json.dumps([0.5] * 30),))
        database.commit()
        updated = prepare_datasets(cfg, make_task(cfg, options))
    assert counts == [[50, 10], [55, 10]]
    assert updated["validation"].rows(np.array([0]))[0]["past"].tolist() == [0.5] * 24

    flags = [*flags, "--dataset_name", "waves"]
    module = add_sample("waves", waves, tmp_path, monkeypatch)
    one, two = (kit.run_training(world, tmp_path / f"waves_{world}", *flags) for world in (1, 2))
    assert kit.distance(one.weights, two.weights) <= 1e-10
    assert one.kind("eval")[-1]["examples"] == 50
    assert np.array_equal(module.Rows("train").rows([7])[0]["past"], module.Rows("train").rows([3, 7])[1]["past"])
    kit.rewind(one.folder, 2, tmp_path / "changed")
    add_sample("waves", waves.replace("0.1", "0.2"), tmp_path, monkeypatch)
    argv = [*flags, "--output_dir", tmp_path / "changed", "--resume", tmp_path / "changed"]
    codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / "here")
    assert codes == [2], texts
    assert "data.rows: " in texts[0]


def test_two_optimizers(forecasting, tmp_path, monkeypatch):
    """Both networks of the GAN are trained, on one process as on two, and a resumed run is bitwise the same."""
    (code,), (edit,) = blocks("Two optimizers", "python"), blocks("Two optimizers", "diff")
    folder, module = edited_train(tmp_path, edit), task_module("gan", code, tmp_path, monkeypatch)
    rates = json.dumps({"discriminator.*": {"lr_factor": 0.5}})
    flags = [*forecasting, *kit.flags(task="gan", max_steps=4, save_steps=2, logging_steps=1, parameter_groups=rates)]

    def train(name: str, world: int = 1) -> kit.Run:
        kit.spawn(world, _train, folder, [*flags, "--output_dir", tmp_path / name], out=tmp_path / f"{name}.out")
        return kit.Run(tmp_path / name)

    with plain_task.registered(module, "gan"):
        one, two = train("one"), train("two", world=2)
        earlier = kit.load_weights(tmp_path / "one" / "checkpoints" / "step_00000002")
        assert {name.partition(".")[0] for name in earlier} == {"generator", "discriminator"}
        assert not any(weight.equal(one.weights[name]) for name, weight in earlier.items())
        assert kit.distance(one.weights, two.weights) <= 1e-10
        kit.rewind(one.folder, 2, tmp_path / "resumed")
        assert kit.same(train("resumed").weights, one.weights)
    line = one.kind("train")[-1]
    assert line["loss"] == line["generator_loss"] != line["discriminator_loss"]


@pytest.mark.cluster
def test_changed_loss_new_number_and_removed_addons(tmp_path):
    """In a copy of the repository."""
    copy = shutil.copytree(
        kit.REPOSITORY, tmp_path / "copy", ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"), symlinks=True
    )
    (commands,) = blocks("Remove a feature", "bash")
    (code,), (edit,) = blocks("A changed loss", "python"), blocks("A new number in the log", "diff")
    edited_train(copy, edit)
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
