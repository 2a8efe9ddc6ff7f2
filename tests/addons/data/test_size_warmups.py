"""Warmups of the global batch and of the length of rows: functions of the step, on any number of processes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from addons.data.size_warmups import Ramp, WarmupSizes, shorten_row
from engine.plan import data_loader
from engine.plan.batch_plan import PlanConfig, plan, training_order
from engine.plan.row_order import permute
from tests.helpers import kit, technique_runs

ledger = pytest.importorskip("addons.tools.ledger", reason="this fork has no addons/tools/ledger.py")

ROWS, BATCH, STEPS = 23, 8, 8  # batches of 2, 2, 4, 4, 6, then 5 (the rest of the epoch), 8, 8
WARMUPS = {
    "batch_size_warmup_start": 2,
    "batch_size_warmup_steps": 5,
    "sequence_length_warmup_start": 3,
    "sequence_length_warmup_steps": 6,
    "max_length": 11,
}
LENGTHS = [3, 3, 3, 6, 6, 9, 11, 11]


# ---- sizes and positions -----------------------------------------------------------------------------------------------


def plain_steps(rows: int, batch: int, start: int, warmup: int, steps: int) -> list[tuple]:
    """Return (epoch, step in the epoch, positions) of each step, by counting."""
    found, epoch, within, at = [], 0, 0, 0
    for step in range(steps):
        size = batch
        if step < warmup:
            size = int(start + (batch - start) * step / warmup)
            size = size // start * start
        positions = list(range(at, min(at + size, rows)))
        found.append((epoch, within, positions))
        within, at = within + 1, at + size
        if at >= rows:
            epoch, within, at = epoch + 1, 0, 0
    return found


@pytest.mark.parametrize(
    "rows, batch, start, warmup",
    [(23, 8, 2, 5), (100, 16, 1, 40), (7, 16, 3, 9), (1, 4, 1, 3), (1003, 32, 8, 1), (64, 8, 4, 200), (50, 8, 7, 6)],
)
def test_steps_are_those_of_a_plain_count(rows, batch, start, warmup):
    sizes = WarmupSizes(rows, batch, Ramp(start, batch, warmup))
    expected = plain_steps(rows, batch, start, warmup, 300)
    by_epoch = {}
    for step, (epoch, within, positions) in enumerate(expected):
        assert sizes.locate(step) == (epoch, within)
        assert sizes.first_step(epoch) == step - within
        begin, end = sizes.positions(epoch, within)
        assert list(range(begin, end)) == positions
        by_epoch.setdefault(epoch, []).append(step)
    last = max(by_epoch)
    for epoch in range(last):
        assert sizes.steps_of(epoch + 1) == by_epoch[epoch][-1] + 1
        assert sizes.epochs_of(by_epoch[epoch][-1] + 1) == epoch + 1


def test_rows_are_shortened_before_they_are_sorted():
    lengths = np.array([9, 4, 7, 2, 8, 3, 9, 9])
    config = PlanConfig(8, 8, 3, 0, lengths, by_cost=False, max_length=Ramp(4, 9, 2).at)
    first, third = plan(config, 0, 0), plan(config, 2, 0)
    assert [micro.cost for micro in first] == [12, 12, 6]  # 4 4 4 | 4 4 4 | 3 2
    assert [micro.cost for micro in third] == [27, 24, 6]


def test_packed_row_is_shortened_within_a_document():
    row = {"input_ids": np.arange(9), "documents": np.array([4, 3, 2]), "bytes": np.int64(30)}
    for length, documents in ((3, [3]), (4, [4]), (5, [4, 1]), (8, [4, 3, 1]), (20, [4, 3, 2])):
        short = shorten_row(row, length)
        assert short["input_ids"].tolist() == list(range(min(length, 9)))
        assert short["documents"].tolist() == documents
    assert row["documents"].tolist() == [4, 3, 2]


# ---- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
    folder = tmp_path_factory.mktemp("warmups")
    generator = np.random.default_rng(1)
    rows = [{"input_ids": generator.integers(0, 50, n).tolist()} for n in generator.integers(3, 12, ROWS)]
    values = technique_runs.files(folder) | WARMUPS | {"global_batch_size": BATCH, "max_steps": STEPS}
    return values | {"train_file": kit.write_jsonl(folder / "train.jsonl", rows)}


def plain_weights(fields: dict) -> dict[str, torch.Tensor]:
    """Return the weights of a plain loop: one process, rows cut by hand, one mean over the targets of a step."""
    plain = technique_runs.Plain(fields)
    optimizer = plain.optimizer()
    rows = kit.open_data(**{k: fields[k] for k in ("model_config", "train_file")}, output_dir="unused")[1]["train"]
    steps = plain_steps(ROWS, BATCH, 2, 5, STEPS)

    def update(step: int) -> None:
        epoch, _, positions = steps[step]
        loss = weight = 0
        for row in rows.rows(permute(np.array(positions), ROWS, 42, epoch)):
            ids = torch.tensor(row["input_ids"][: LENGTHS[step]]).long()[None]
            logits = plain.model(input_ids=ids).logits
            loss = loss + torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
            weight += ids.shape[1] - 1
        optimizer.zero_grad()
        (loss / weight).backward()
        optimizer.step()

    return plain.train(update, STEPS)


def test_warmups_are_exact_for_every_split(fields, tmp_path):
    expected = plain_weights(fields)
    splits = [(1, 8), (1, 2), (2, 3), (3, 1), (4, 4)]
    runs = [technique_runs.train(tmp_path / f"{world}x{micro}", fields, world, micro) for world, micro in splits]
    for run in runs:
        assert kit.distance(run.weights, {name: expected[name] for name in run.weights}) <= 1e-10
        assert ledger.compare(run.folder) is None
        assert ledger.compare(run.folder, runs[0].folder) is None
    _, steps = ledger.read(runs[0].folder)
    assert [examples for examples, _ in steps.values()] == [2, 2, 4, 4, 6, 5, 8, 8]
    weights = [line["weight"] for line in runs[0].kind("train")]
    assert weights[0] == 2 * 2  # two rows of three tokens
    epochs = [line["epoch"] for line in runs[0].kind("train")]
    assert epochs == [pytest.approx(at) for at in (1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 4 / 3, 5 / 3)]
    two = technique_runs.train(tmp_path / "workers", fields, 2, 3, dataloader_num_workers=2)
    assert kit.distance(two.weights, runs[2].weights) == 0


@pytest.mark.cluster
def test_warmups_under_fsdp2(fields, tmp_path):
    technique_runs.check_fsdp2(tmp_path, fields)


def test_resume_within_the_warmups_on_more_processes(fields, tmp_path):
    straight = technique_runs.check_resume(tmp_path, fields)  # from step 2
    more = technique_runs.train(kit.rewind(straight.folder, 4, tmp_path / "more"), fields, 3, 4)
    assert kit.distance(more.weights, straight.weights) <= 1e-10
    assert ledger.compare(more.folder) is None


def test_mutant_warmup_that_begins_again_on_resume_is_caught(fields, tmp_path, monkeypatch):
    straight = technique_runs.train(tmp_path / "run", fields, 1, 4)
    kit.rewind(straight.folder, 2)

    def from_the_start(config, rank, world, start, stop):
        for micro in training_order(config, rank, world, 0, stop - start):
            yield replace(micro, step=micro.step + start)

    monkeypatch.setattr(data_loader, "training_order", from_the_start)
    assert ledger.compare(technique_runs.train(straight.folder, fields, 1, 4).folder).startswith("step 3 differs: ")


def test_mutant_weights_counted_before_the_cut_are_caught(fields, tmp_path, monkeypatch):
    expected = plain_weights(fields)
    collate = data_loader.collate

    def counts_first(task, micro, rows, training=True):
        weight = task.collate(rows, training).weight
        micro, batch = collate(task, micro, rows, training)
        return micro, batch._replace(weight=weight)

    monkeypatch.setattr(data_loader, "collate", counts_first)
    run = technique_runs.train(tmp_path / "run", fields, 1, 4)
    assert kit.distance(run.weights, {name: expected[name] for name in run.weights}) > 1e-6


# ---- the run file ------------------------------------------------------------------------------------------------------
