"""Curriculum and row weights: the rows of a step are a function of seed, epoch and step, recomputed here in plain Python."""

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest

from addons.data._row_numbers import Column
from addons.data.curriculum import EasyToHard
from addons.data.row_weights import WeightedDraws
from addons.data.size_warmups import Ramp, WarmupSizes
from engine.config.errors import UsageError
from engine.plan import data_loader
from engine.plan.batch_plan import PlanConfig, StepSizes, plan
from engine.plan.row_order import permute
from tests.helpers import kit, technique_runs

ledger = pytest.importorskip("addons.tools.ledger", reason="this fork has no addons/tools/ledger.py")

ROWS, BATCH, STEPS = 23, 6, 9
MASK = (1 << 64) - 1


def plain_draws(start: int, stop: int, weights: list[float], seed: int, epoch: int) -> list[int]:
    """Return weighted draws by Python's integers and `bisect`."""
    digest = hashlib.blake2b(repr(("weighted draw", seed, epoch)).encode(), digest_size=8).digest()
    key, sums, found = int.from_bytes(digest, "little") >> 1, list(accumulate(weights)), []
    for position in range(start, stop):
        x = (key + (position + 1) * 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        x ^= x >> 31
        found.append(bisect_right(sums, (x >> 11) / 2**53 * sums[-1]))
    return found


def ids_of(config: PlanConfig, steps: int) -> list[list[int]]:
    return [[int(i) for m in plan(config, *config.sizes.locate(s)) for i in m.ids] for s in range(steps)]


def weighted_ids(start: int, stop: int, cumulative: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    return WeightedDraws(cumulative).draw(PlanConfig(len(cumulative), 1, 1, seed), epoch, start, stop)


# ---- the plan ----------------------------------------------------------------------------------------------------------


def test_weighted_draws_are_those_of_plain_python():
    weights = [0.5, 0.0, 2.0, 1.0, 0.0, 3.5, 1e-3, 0.0]
    found = weighted_ids(100, 5100, np.cumsum(weights), 7, 3)
    assert found.tolist() == plain_draws(100, 5100, weights, 7, 3)
    counts = Counter(found.tolist())
    assert not {1, 4, 7} & counts.keys()  # a weight of zero is never drawn
    for row in (0, 2, 3, 5):
        assert abs(counts[row] / 5000 - weights[row] / 7.001) < 0.03
    assert weighted_ids(100, 5100, np.cumsum(weights), 7, 4).tolist() != found.tolist()


@pytest.mark.parametrize("sizes", [StepSizes(ROWS, BATCH), WarmupSizes(ROWS, BATCH, Ramp(2, 6, 3))])
@pytest.mark.parametrize("steps", [1, 3, 4, 7, 12])
def test_curriculum_sorts_the_rows_of_its_steps(steps, sizes):
    """Within an epoch every row still comes once; the rows of the first steps come from easy to hard."""
    values = np.random.default_rng(steps).integers(0, 5, ROWS)
    config = PlanConfig(ROWS, BATCH, BATCH, 3, step_sizes=sizes)
    plain, found = ids_of(config, 14), ids_of(replace(config, ids=EasyToHard(values, steps).ids), 14)
    by_epoch = {}
    for step in range(14):
        by_epoch.setdefault(config.sizes.locate(step)[0], []).append(step)
    for numbers in by_epoch.values():
        rows = [i for step in numbers if step < steps for i in plain[step]]
        order = sorted(range(len(rows)), key=lambda at: (values[rows[at]], at))
        assert [i for step in numbers if step < steps for i in found[step]] == [rows[at] for at in order]
        assert [found[step] for step in numbers if step >= steps] == [plain[step] for step in numbers if step >= steps]


# ---- runs --------------------------------------------------------------------------------------------------------------


def write_rows(path, change=None):
    generator = np.random.default_rng(1)
    rows = [{"weight": i % 4, "difficulty": round(float(generator.random()), 3)} for i in range(ROWS)]
    for row, length in zip(rows, generator.integers(3, 12, ROWS), strict=True):
        row["input_ids"] = generator.integers(0, 50, length).tolist()
    rows[7] |= change or {}
    return kit.write_jsonl(path, rows)


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
    folder = tmp_path_factory.mktemp("order")
    values = technique_runs.files(folder) | {"global_batch_size": BATCH, "max_steps": STEPS}
    values |= {"curriculum_column": "difficulty", "curriculum_steps": 5}
    return values | {"train_file": write_rows(folder / "train.jsonl")}


def expected_ids(fields: dict, weighted: bool) -> list[list[int]]:
    """Return the rows of each step from the file, by sorting: 4 steps of an epoch and 1 of the next are the curriculum."""
    rows = [json.loads(line) for line in fields["train_file"].read_text().splitlines()]
    found = []
    for epoch, in_curriculum in ((0, ROWS), (1, BATCH), (2, 0)):
        ids = permute(np.arange(ROWS), ROWS, 42, epoch).tolist()
        if weighted:
            ids = plain_draws(0, ROWS, [float(row["weight"]) for row in rows], 42, epoch)
        first = sorted(ids[:in_curriculum], key=lambda i: rows[i]["difficulty"])
        ids = first + ids[in_curriculum:]
        found += [ids[start : start + BATCH] for start in range(0, ROWS, BATCH)]
    return found[:STEPS]


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_of_every_step_on_any_number_of_processes(fields, tmp_path, weighted):
    if weighted:
        fields = fields | {"sample_weight_column": "weight"}
    one = technique_runs.train(tmp_path / "one", fields, 1, 6)
    _, steps = ledger.read(one.folder)
    for (examples, text), ids in zip(steps.values(), expected_ids(fields, weighted), strict=True):
        assert examples == len(ids)
        assert text == ledger.hash_text(*ledger.hash_ids(np.array(ids)))
    assert ledger.compare(one.folder) is None  # prepares the data of config.yaml to know the order
    for world, micro, workers in ((2, 2, 2), (3, 1, 0)):
        run = technique_runs.train(tmp_path / f"{world}", fields, world, micro, dataloader_num_workers=workers)
        assert kit.distance(run.weights, one.weights) <= 1e-10
        assert ledger.compare(run.folder, one.folder) is None


def test_resume_within_the_curriculum_on_more_processes(fields, tmp_path):
    fields = fields | {"sample_weight_column": "weight", "batch_size_warmup_start": 2, "batch_size_warmup_steps": 4}
    straight = technique_runs.check_resume(tmp_path, fields, micro=2)  # from step 2
    more = technique_runs.train(kit.rewind(straight.folder, 4, tmp_path / "more"), fields, 3, 1)
    assert kit.distance(more.weights, straight.weights) <= 1e-10
    assert ledger.compare(more.folder, straight.folder) is None


def test_mutant_order_that_depends_on_the_rank_is_caught(fields, tmp_path, monkeypatch):
    order = data_loader.training_order

    def own_order(config, rank, *rest):
        curriculum = config.ids.__self__
        values = np.asarray(curriculum.values) * (-1) ** rank
        return order(replace(config, ids=EasyToHard(values, curriculum.steps).ids), rank, *rest)

    monkeypatch.setattr(data_loader, "training_order", own_order)
    run = technique_runs.train(tmp_path / "run", fields, 2, 3)
    assert ledger.compare(run.folder).startswith("step 1 differs: ")


def test_rows_that_are_dropped_take_their_numbers_with_them(fields, tmp_path):
    raw = [json.loads(line) for line in write_rows(tmp_path / "raw.jsonl").read_text().splitlines()]
    limit = sorted(len(row["input_ids"]) for row in raw)[ROWS // 2]
    _, splits = open_rows(fields, tmp_path, max_length=limit, long_rows="drop")
    kept = [row["difficulty"] for row in raw if len(row["input_ids"]) <= limit]
    column = Column("curriculum_column", fields["curriculum_column"])
    assert column.read(splits["train"]).tolist() == kept
    assert len(splits["train"]) == len(kept) < ROWS


# ---- errors ------------------------------------------------------------------------------------------------------------


def open_rows(fields: dict, tmp_path, change=None, **more):
    values = {name: fields[name] for name in ("model_config", "curriculum_column", "curriculum_steps")}
    return kit.open_data(
        **(values | {"train_file": write_rows(tmp_path / "rows.jsonl", change), "output_dir": "x"} | more)
    )


@pytest.mark.parametrize(
    "change, more, message",
    [
        (
            {"weight": -1},
            {"sample_weight_column": "weight"},
            r"rows.jsonl, line 8: .*`weight` is -1: it must be a number",
        ),
        ({"difficulty": None}, {}, r"rows.jsonl, line 8: .*`difficulty` is None: it must be a number"),
        ({}, {"curriculum_column": "dificulty"}, "no such column among .*did you mean difficulty"),
        ({}, {"curriculum_column": "input_ids"}, r"line 1: .*`input_ids` is \[.*: it must be a number"),
        ({"difficulty": "a"}, {}, "line 8: .*`difficulty` is 'a': it must be a number"),
        ({}, {"packing": True}, "packing.*give --curriculum_column length"),
        ({}, {"sample_weight_column": "zero"}, "the sum of all weights is 0: it must be positive"),
    ],
)
def test_invalid_numbers_are_refused_with_their_row(fields, tmp_path, change, more, message):
    if more.get("sample_weight_column") == "zero":
        path = kit.write_jsonl(tmp_path / "zero.jsonl", [{"input_ids": [1, 2, 3], "difficulty": 1, "zero": 0}] * 5)
        more = more | {"train_file": path}
    with pytest.raises(UsageError, match=message):
        open_rows(fields, tmp_path, change, **more)


def test_changed_numbers_are_another_run(fields, tmp_path):
    (_, before), (_, again) = open_rows(fields, tmp_path), open_rows(fields, tmp_path)
    (_, after) = open_rows(fields, tmp_path, {"difficulty": 0.5})
    assert before["train"].stats["rows"] == again["train"].stats["rows"] != after["train"].stats["rows"]
    column = Column("curriculum_column", "difficulty")
    assert column.read(before["train"])[7] != 0.5
    assert column.read(after["train"])[7] == 0.5
