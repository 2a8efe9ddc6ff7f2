"""Rows that a file of samples/ computes from their ids: exact splits, kills, other code, and rows that are no function."""

import itertools
import json

import numpy as np
import pytest

from engine.config.errors import UsageError
from engine.plan.computed_rows import ComputedRows, open_computed_rows
from engine.rows.sources import Source
from tests.conformance.test_task import open_task
from tests.helpers import kit, plain_task
from tests.helpers.killing import train_until_killed
from tests.helpers.sample_files import add_sample

CODE = """
import os

import numpy as np

from engine.plan.computed_rows import ComputedRows


def depends_on():
    return os.environ.get("NOISE", "0.1")


class Rows(ComputedRows):
    def count(self):
        return {"train": 83, "validation": 21}[self.split]

    def rows(self, ids):
        return [self.row(row_id) for row_id in ids]

    def row(self, row_id):
        generator = self.generator(row_id)
        x = generator.normal(size=8) * float(os.environ.get("UNDECLARED", "1"))
        return {"x": x, "y": (x[:4] > 0).astype(np.int64) + generator.integers(0, 2, 4)}
"""


@pytest.fixture
def flags(tmp_path, monkeypatch):
    """The flags of a run of the plain task on computed rows."""
    add_sample("signs", CODE, tmp_path, monkeypatch)
    with plain_task.registered():
        yield plain_task.flags({"dataset_name": "signs", "dataloader_num_workers": 1})


def test_computed_rows_are_exact_on_two_processes_and_after_a_kill(flags, tmp_path, monkeypatch):
    one = kit.run_training(1, tmp_path / "one", *flags)
    two = kit.run_training(2, tmp_path / "two", *flags)
    assert kit.distance(one.weights, two.weights) <= 1e-10
    assert one.kind("eval")[-1]["examples"] == two.kind("eval")[-1]["examples"] == 21
    assert kit.ledger_text(one.folder) == kit.ledger_text(two.folder)
    assert kit.first_other_step(one.folder) is None
    assert kit.run_evaluation(2, tmp_path / "eval", "--checkpoint", one.folder) == one.kind("eval")[-1]
    train_until_killed(13, 2, tmp_path / "killed", *flags)
    resumed = kit.run_training(2, tmp_path / "killed", *flags)
    assert "Resuming from step 8" in (tmp_path / "killed.out" / "rank0.txt").read_text()
    assert kit.same(resumed.weights, two.weights)
    assert kit.timeless(resumed.folder) == kit.timeless(two.folder)
    for change in ("code", "input", "undeclared"):
        kit.rewind(two.folder, 8, tmp_path / change)
        with monkeypatch.context() as patch:
            add_sample("signs", CODE + "changed = 1\n" * (change == "code"), tmp_path, patch)
            patch.setenv("NOISE", "0.2" if change == "input" else "0.1")
            patch.setenv("UNDECLARED", "1.1" if change == "undeclared" else "1")
            argv = [*flags, "--output_dir", tmp_path / change, "--resume", tmp_path / change]
            codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / f"{change}_here")
        assert codes == [2], texts
        assert "data.rows: " in texts[0].rstrip().splitlines()[-1]


def test_part_of_a_mixture(tmp_path, monkeypatch):
    """Beside files; the weights decide how often a row is drawn."""
    data = plain_task.write_data(tmp_path)
    add_sample("signs", CODE, tmp_path, monkeypatch)
    files = {name: [str(path)] for name, path in data.items()}
    mixture = {"stored": files | {"weight": 1}, "computed": {"dataset_name": "signs", "weight": 3}}
    with plain_task.registered():
        _, splits, _ = open_task(plain_task.flags({"mixture": json.dumps(mixture)}))
    stored, computed = splits["train"].quotas
    assert computed[1] == pytest.approx(3 * stored[1], rel=0.05)
    rows = splits["train"].rows(np.array([0, 83, 165]))
    assert rows[1]["x"].tolist() == splits["train"].parts["computed"].rows(np.array([0]))[0]["x"].tolist()
    assert np.array_equal(splits["train"].lengths[np.array([0, 83])], [1, 1])


# ---- mistakes --------------------------------------------------------------------------------------------------------


class Rows(ComputedRows):
    def count(self):
        return 10

    def rows(self, ids):
        return [{"x": np.float64(i)} for i in ids]


class Random(Rows):
    def rows(self, ids):
        return [{"x": np.random.default_rng().normal()} for _ in ids]


class InOrder(Rows):
    """A row depends on the rows beside it."""

    def rows(self, ids):
        return [{"x": place} for place, _ in enumerate(ids)]


class TooFew(Rows):
    def rows(self, ids):
        return super().rows(ids[1:])


class TableOfProcess(Rows):
    """Rows stay the same in a process, but another one has others."""

    def __init__(self, split):
        super().__init__(split)
        self.table = np.random.default_rng().normal(size=10)

    def rows(self, ids):
        return [{"x": self.table[i]} for i in ids]


class Failing(Rows):
    def count(self):
        return len(open("/does/not/exist").read())


class NotAsMany(Rows):
    """Says that there are more rows than there are."""

    def rows(self, ids):
        return [{"x": np.arange(9)[i]} for i in ids]


def with_method(name: str, returned) -> type:
    """Return a class of rows with one method that returns `returned`, or what it makes of the ids."""
    return type("Rows", (Rows,), {name: lambda self, *ids: returned(*ids) if callable(returned) else returned})


def opened(kind: type, split: str = "train"):
    return open_computed_rows(Source("dataset_name", split, name="x", computed=kind))


def test_sound_rows_are_opened():
    split = opened(Rows)
    assert (len(split), split.stats["tokens"], split.stats["longest"]) == (10, 10, 1)
    assert split.values("x").tolist() == list(range(10))
    assert split.longest(3).tolist() == [0, 1, 2]
    named = (
        Source("dataset_name", split, name="x", computed=Rows, dataset_split="easy")
        for split in ("train", "validation")
    )
    assert [open_computed_rows(source).computed.split for source in named] == ["easy", "validation"]


@pytest.mark.parametrize(
    "kind, words",
    [
        (Random, "another x for row 0"),
        (InOrder, "another x for row 1"),
        (TableOfProcess, "another x for row 0"),
        (TooFew, "4 rows for 5 ids"),
        (Failing, "count(): .*/does/not/exist"),
        (with_method("count", lambda: {}["size"]), "count(): KeyError: 'size'"),
        (NotAsMany, "rows(): index 9 is out of bounds"),
        (type("Rows", (Rows,), {"__init__": lambda self: None}), "__init__(): .* 1 positional argument"),
        (with_method("count", -3), "count() returned int -3"),
        (with_method("count", 9.5), "count() returned float 9.5"),
        (with_method("count", itertools.count(5).__next__), "count() returns 5"),
        (with_method("rows", None), "rows() returned NoneType"),
        (with_method("rows", lambda ids: ((i, i) for i in ids)), "rows() returned generator"),
        (with_method("rows", lambda ids: [(i, i) for i in ids]), "rows() returned list"),
        (with_method("lengths", 5), "lengths() returned ndarray 5 for 10 ids"),
        (with_method("lengths", lambda ids: ids[1:] + 1), "lengths() returned ndarray .* for 10 ids"),
        (with_method("lengths", lambda ids: ids + 0.5), "lengths() returned ndarray .* for 10 ids"),
        (with_method("lengths", lambda ids: ids), "lengths() returned ndarray .* for 10 ids"),
        (with_method("lengths", lambda ids: np.arange(len(ids)) + 1), "lengths() returns .* in reverse"),
    ],
)
def test_rows_that_are_no_function_of_their_ids_are_refused(kind, words):
    words = words.replace("(", "[(]").replace(")", "[)]")
    with pytest.raises(UsageError, match=f"test_computed_rows.py(, line [0-9]+)?: .*{words}"):
        opened(kind)


@pytest.mark.parametrize("field", ["validation_split", "streaming", "sample_weight_column"])
def test_fields_that_need_files_are_refused(flags, field):
    addon = {"validation_split": "data/held_out", "streaming": "streaming", "sample_weight_column": "data/row_weights"}
    kit.need_addon(addon[field])
    value = {"validation_split": 0.1, "streaming": True, "sample_weight_column": "x"}[field]
    more = {"max_steps": 3} if field == "streaming" else {}
    with pytest.raises(UsageError, match=f"{field}.* is given, but dataset_name signs"):
        open_task([*flags, *kit.flags(**{field: value}, **more)])


@pytest.mark.parametrize("field", ["dataset_config_name", "dataset_revision"])
def test_fields_of_the_hub_are_refused(flags, field):
    with pytest.raises(UsageError, match=f"{field} is v2, but signs is a file of samples/"):
        open_task([*flags, f"--{field}", "v2"])


def test_task_that_reads_features_needs_them(flags, monkeypatch):
    monkeypatch.setattr(plain_task.Task, "on_prepared", lambda self, features: None)
    with pytest.raises(UsageError, match="define features"):
        open_task(flags)
