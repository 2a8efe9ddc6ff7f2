"""A row on which a fork's `encode` fails is named with file, line, column and value; exit code 2 on all ranks."""

import types

import pytest

from src.data import prepare
from tests.helpers import kit, plain_task


class Task(plain_task.Task):
    """A task of a fork, which expects text in `x` and does not check its rows."""

    def encode(self, batch, locations):
        numbers = []
        for text in batch["x"]:
            numbers.append([word if word == "a" else float(word) for word in text.split()])
        return super().encode({"x": numbers, "y": batch["y"]}, locations)

    def collate(self, rows, training):
        if any(row["y"][0] == 2 for row in rows):
            raise KeyError("two")
        return super().collate(rows, training)


def outcome(tmp_path, rows, world=1, **more):
    module = types.ModuleType("fork")
    module.Task, module.Options = Task, plain_task.Options
    data = {"train_file": kit.write_jsonl(tmp_path / "rows.jsonl", rows)}
    fields = {"cache_dir": tmp_path / "cache", "output_dir": tmp_path / "run"} | more
    with plain_task.registered(module, "fork"):
        flags = plain_task.flags(data, task="fork", max_steps=2, **fields)
        codes, texts = kit.run_command("train.py", *flags, folder=tmp_path / "here", world=world)
    return codes, "\n".join(texts)


GOOD = [{"x": " ".join(["0.5"] * 8), "y": [0, 1, 0, 1], "z": i} for i in range(60)]


@pytest.mark.parametrize(
    "bad, value, streaming",
    [({"x": None}, "null", False), ({"x": None}, "null", True), ({"x": "a " * 900}, "'a a a", False)],
)
def test_row_that_encode_cannot_read_is_named(tmp_path, monkeypatch, bad, value, streaming):
    if streaming:
        kit.need_addon("streaming")
    monkeypatch.setattr(prepare, "BLOCK", 1000)
    rows = [*GOOD[:41], GOOD[0] | bad, *GOOD[41:]]
    more = {"world": 1, "streaming": True} if streaming else {"world": 2}
    codes, text = outcome(tmp_path, rows, **more)
    assert set(codes) == {2}
    where = "row 41" if streaming else "line 42"
    message = f"rows.jsonl, {where}: train data: `encode` of task fork fails for `x` = {value}"
    (sentence,) = {line for line in text.splitlines() if line.startswith("error: ")}  # of each rank, without a launcher
    assert message in sentence
    assert len(sentence) < 500
    cause = "AttributeError: 'NoneType' object has no attribute 'split' in test_encode_errors.py, line"
    assert (cause if bad["x"] is None else "column `x` is no list") in sentence
    if bad["x"] is None:
        assert 1 <= text.count("text.split()") <= len(codes)  # the traceback, once on each rank that meets the row


def test_row_that_collate_cannot_read_is_named(tmp_path):
    rows = [row | {"y": [2, 1, 0, 1]} if i == 41 else row for i, row in enumerate(GOOD)]
    codes, text = outcome(tmp_path, rows, global_batch_size=61, per_device_batch_size=61)
    assert set(codes) == {1}
    assert "row 41 fails alone: `x` = array(" in text
    assert "KeyError: 'two'" in text
