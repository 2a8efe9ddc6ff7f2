"""validation_split holds out rows by their content alone."""

import json
import shutil

import datasets
import numpy as np
import pytest

from addons.data import held_out
from addons.data._row_numbers import Column
from engine.config.errors import UsageError
from engine.rows import file_parts
from engine.rows.prepared_split import count_repeated_rows
from tests.engine.rows.test_media import Pictures, opened
from tests.helpers import images, kit

SHARE = 0.2
GENERATOR = np.random.default_rng(0)
ROWS = [GENERATOR.integers(0, 50, 6).tolist() for _ in range(150)]
ROWS += ROWS[:60] + ROWS[:20]  # repeated rows


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fields")
    return {"model_config": kit.write_yaml(folder / "gpt2.yaml", kit.TINY), "validation_split": SHARE}


@pytest.fixture
def small(monkeypatch):
    """Many pieces of several blocks each."""
    monkeypatch.setattr(file_parts, "PART", 300)


def write(folder, rows, files=1, suffix="jsonl"):
    """Write the rows, one after the other, to some files; return these."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for i, part in enumerate(np.array_split(np.arange(len(rows)), files)):
        found.append(folder / f"{i}.{suffix}")
        table = datasets.Dataset.from_list([{"input_ids": rows[n]} for n in part])
        (table.to_parquet if suffix == "parquet" else table.to_json)(found[-1])
    return found


def ids_of(split) -> list[tuple]:
    return [tuple(row["input_ids"].tolist()) for row in split.rows(np.arange(len(split)))]


def open_rows(fields, folder, rows, files=1, suffix="jsonl", **more):
    given = write(folder / "data", rows, files, suffix)
    _, splits = kit.open_data(**fields | {"train_file": given, "cache_dir": folder / "cache"} | more)
    return splits


# ---- which rows --------------------------------------------------------------------------------------------------------


def check_choice(fields, folder):
    """The held-out rows are the same set for other files, order, pieces and seed, and no row is on both sides."""
    ways = {
        "one": {},
        "three": {"files": 3, "seed": 1},
        "parquet": {"suffix": "parquet"},
        "reversed": {"rows": ROWS[::-1]},
        "more": {"rows": ROWS + [GENERATOR.integers(0, 50, 6).tolist() for _ in range(40)]},
    }
    found = {}
    for name, way in ways.items():
        rows = way.pop("rows", ROWS)
        splits = open_rows(fields, folder / name, rows, **way)
        out = set(ids_of(splits["validation"]))
        assert ids_of(splits["train"]) == [tuple(row) for row in rows if tuple(row) not in out]
        assert ids_of(splits["validation"]) == [tuple(row) for row in rows if tuple(row) in out]
        assert count_repeated_rows(splits) == (0, len(splits["validation"]))
        assert splits["train"].stats["source_rows"] == len(splits["train"])
        found[name] = out & set(map(tuple, ROWS))
    assert 0.1 < len(found["one"]) / 150 < 0.3
    assert list(found.values()) == [found["one"]] * len(found)


def test_held_out_rows_depend_on_their_content_alone(fields, tmp_path, small):
    check_choice(fields, tmp_path)


@pytest.mark.parametrize("mutant", ["position", "random"])
def test_mutants_that_choose_by_position_or_at_random(fields, tmp_path, monkeypatch, mutant):
    count = [0]

    def chosen(self, rows, features):
        if mutant == "position":
            found = np.arange(len(rows)) % round(1 / SHARE) == 0
        else:  # a seed per process
            count[0] += 1
            found = np.random.default_rng(count[0]).random(len(rows)) < SHARE
        return found == (self.split == "validation")

    monkeypatch.setattr(held_out.HeldOutSource, "choose_rows", chosen)
    with pytest.raises(AssertionError):
        check_choice(fields, tmp_path)


def test_value_is_the_same_however_it_is_stored(tmp_path):
    """A later row makes numbers fractions, gives objects another key and classes another number; files are moved."""
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"image")
    kinds = {"number": datasets.Value("int64"), "turns": None, "label": datasets.ClassLabel(names=["x", "y"])}
    kinds["numbers"] = datasets.List(datasets.Value("int64"))
    kinds["image"] = datasets.Image()
    before = {"number": 3, "numbers": [1, 2], "turns": [{"role": "user", "content": "hi"}], "label": 1}
    after = {
        "turns": [{"content": "hi", "name": None, "role": "user"}],
        "number": 3.0,
        "numbers": [1.0, 2.0],
        "label": 2,
        "note": None,
    }
    media = [{"bytes": None, "path": str(tmp_path / name)} for name in ("a", "b")] + [{"bytes": b"image", "path": None}]
    kinds_after = kinds | {"label": datasets.ClassLabel(names=["new", "x", "y"]), "note": datasets.Value("string")}
    hashes = set()
    for row, types in ((before, kinds), (after, kinds_after)):
        for image in media:
            values = {name: held_out._stable(value, types[name]) for name, value in (row | {"image": image}).items()}
            hashes.add(held_out._hash(values))
    assert len(hashes) == 1
    assert held_out._hash(before) not in {held_out._hash(before | {"label": 0}), *hashes}


def test_packed_documents_and_rows_of_a_mixture(fields, tmp_path, small):
    splits = open_rows(fields, tmp_path / "packed", ROWS, packing=True, max_length=24)
    assert sum(part.stats["source_rows"] for part in splits.values()) == len(ROWS)
    assert count_repeated_rows(splits)[0] == 0 < count_repeated_rows(splits)[1]
    plain = open_rows(fields, tmp_path / "plain", ROWS)
    files = write(tmp_path / "parts", ROWS, 2)
    mixture = {name: {"train_file": str(file)} for name, file in zip("ab", files, strict=True)}
    _, mixed = kit.open_data(**fields, mixture=json.dumps(mixture), cache_dir=tmp_path / "cache")
    assert set(ids_of(mixed["validation"])) == set(ids_of(plain["validation"]))
    assert [name for name, *_ in mixed["validation"].segments()] == ["a", "b"]


def test_only_images_of_the_split_are_decoded(tmp_path):
    """The hash is of the file, wherever it is, not of the decoded pixels."""
    kept = {}
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        images.write_pictures(tmp_path / name / "train.parquet", 30)
        task, splits = opened(Pictures, tmp_path / name, validation_split=SHARE)
        assert len(task.seen) == 30 == sum(map(len, splits.values()))
        kept[name] = [row["flat"].tobytes() for row in splits["validation"].rows(np.arange(len(splits["validation"])))]
    assert 0 < len(kept["here"]) < 15
    assert kept["here"] == kept["there"]


def test_numbers_of_rows_follow_the_rows_kept(fields, tmp_path, small):
    """A held-out row needs no weight; another row without one is named with its line."""
    chosen = held_out.are_held_out([{"input_ids": row} for row in ROWS], {}, SHARE)
    rows = [{"input_ids": row, "n": -1 if out else i} for i, (row, out) in enumerate(zip(ROWS, chosen, strict=True))]
    more = {"sample_weight_column": "n", "cache_dir": tmp_path / "cache"}
    file = kit.write_jsonl(tmp_path / "rows.jsonl", rows)
    _, splits = kit.open_data(**fields, train_file=file, **more)
    expected = [row["n"] for row in rows if row["n"] >= 0]
    weights = Column("sample_weight_column", "n", weights=True).read(splits["train"])
    assert np.diff(weights, prepend=0).tolist() == expected
    line = int(np.flatnonzero(~chosen)[50])
    kit.write_jsonl(file, [row | {"n": -2} if i == line else row for i, row in enumerate(rows)])
    with pytest.raises(UsageError, match=f"rows.jsonl, line {line + 1}: .*`n` is -2"):
        kit.open_data(**fields, train_file=file, **more)


# ---- runs --------------------------------------------------------------------------------------------------------------


def test_evaluation_repeats_and_resume_keeps_the_held_out_rows(fields, tmp_path):
    data = write(tmp_path / "data", ROWS, 2)
    values = fields | {"train_file": data, "cache_dir": tmp_path / "cache", "dtype": "float64", "global_batch_size": 8}
    values |= {"per_device_batch_size": 4, "max_steps": 4, "eval_steps": 4, "save_steps": 4}
    given, cache = kit.flags(**values), kit.flags(cache_dir=values["cache_dir"])
    one = kit.run_training(1, tmp_path / "one", *given)
    two = kit.run_training(2, tmp_path / "two", *given)
    line = one.kind("eval")[-1]
    assert line["loss"] == pytest.approx(two.kind("eval")[-1]["loss"], rel=1e-12)
    assert kit.distance(one.weights, two.weights) <= 1e-10
    again = kit.run_evaluation(2, tmp_path / "again", "--checkpoint", one.folder, *cache)
    assert (again["loss"], again["examples"]) == (line["loss"], line["examples"])
    shutil.move(tmp_path / "data", tmp_path / "moved")
    moved = [tmp_path / "moved" / file.name for file in data]
    again = kit.run_evaluation(1, tmp_path / "again", "--checkpoint", one.folder, *kit.flags(train_file=moved), *cache)
    assert again["loss"] == line["loss"]
    shutil.move(tmp_path / "moved", tmp_path / "data")
    given = kit.flags(**values | {"output_dir": one.folder, "validation_split": 0.3})
    codes, texts = kit.run_command("train.py", *given, folder=tmp_path / "resume")
    assert codes == [2]
    assert "validation_split: 0.2 → 0.3" in texts[0]
