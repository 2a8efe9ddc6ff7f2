"""Which examples a run saw in each step can be checked afterwards: against the plan, or against another run."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import train
from src.config.errors import UsageError
from src.data import batch_plan, data_loader
from src.reporting import ledger
from tests.helpers import kit

STEPS = 36  # the tail of the first epoch is step 32, of 11 examples


def recipe(files, **fields) -> list[str]:
    values = {
        "model_config": files / "llama.yaml",
        "train_file": files / "train.jsonl",
        "per_device_batch_size": 8,
        "max_steps": STEPS,
        "max_length": 16,
        "logging_steps": 5,
        "save_steps": 10,
    } | fields
    return kit.flags(**values)


@pytest.fixture(scope="module")
def one(files, tmp_path_factory):
    return kit.run_training(1, tmp_path_factory.mktemp("ledger") / "one", *recipe(files)).folder


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def written(folder: Path, entries: list[dict]) -> Path:
    folder.mkdir()
    (folder / "ledger.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder


def command(*argv) -> tuple[int, str]:
    """Return exit code and output of `python -m src.reporting.ledger ...`."""
    words = [sys.executable, "-m", "src.reporting.ledger", *map(str, argv)]
    done = subprocess.run(words, cwd=kit.REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


# ---- the hash --------------------------------------------------------------------------------------------------------


def test_the_hash_does_not_depend_on_order_or_split_and_sees_every_id():
    ids = np.random.default_rng(0).permutation(10_000)[:500]
    whole = batch_plan.hash_ids(ids)
    parts = [batch_plan.hash_ids(part) for part in np.array_split(ids[::-1], 7)]
    assert tuple(map(sum, zip(*parts, strict=True))) == whole
    assert batch_plan.hash_ids(ids[:0]) == (0.0, 0.0)
    words = {ledger.hash_text(*batch_plan.hash_ids(np.delete(ids, i))) for i in range(500)}
    words |= {ledger.hash_text(*batch_plan.hash_ids(np.append(ids, i))) for i in ids}
    words |= {
        ledger.hash_text(*batch_plan.hash_ids(np.append(ids[1:], i))) for i in ids[1:]
    }  # one repeated instead of another
    assert len(words) == 500 + 500 + 499
    assert ledger.hash_text(*whole) not in words


def test_the_sums_are_exact_for_batches_of_a_million():
    ids = np.arange(10**6) + 10**9
    hashed = batch_plan.splitmix64(ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    low, high = batch_plan.hash_ids(ids)
    assert int(low) == sum((hashed & np.uint64(0xFFFFFFFF)).tolist())
    assert int(high) == sum((hashed >> np.uint64(32)).tolist())


def test_mutant_hash_that_adds_up_ids_is_caught():
    """1 + 4 is 2 + 3."""
    assert sum([1, 4]) == sum([2, 3])
    assert batch_plan.hash_ids(np.array([1, 4])) != batch_plan.hash_ids(np.array([2, 3]))


# ---- the same on any number of processes, any cut, any course --------------------------------------------------------


def test_a_line_for_every_step_and_what_they_are_cut_from(one):
    first, *rest = lines(one)
    assert first == {"step": 0, "after": 0, "plan": {"examples": 1003, "global_batch_size": 32, "seed": 42}}
    assert [line["step"] for line in rest] == list(range(1, STEPS + 1))
    assert [line["examples"] for line in rest] == [32] * 31 + [11] + [32] * 4
    assert len({line["ids"] for line in rest}) == STEPS


@pytest.mark.parametrize("world, micro", [(1, 5), (2, 8), (2, 32), (3, 3)])
def test_the_ledger_does_not_depend_on_processes_or_micro_batches(files, one, tmp_path, world, micro):
    run = kit.run_training(world, tmp_path / "run", *recipe(files, per_device_batch_size=micro))
    assert lines(run.folder) == lines(one)


def test_the_ledger_of_a_run_that_was_killed_and_goes_on_elsewhere_is_the_same(files, one, tmp_path):
    """Killed on two processes at step 27, going on from step 20 on three; what the ledger held after it is cut back."""
    with pytest.MonkeyPatch.context() as patch:
        count, update, add = [0], train.optimizer_step, ledger.Ledger.add

        def dying(*args):
            count[0] += 1
            if count[0] == 27:
                os._exit(9)
            return update(*args)

        def at_once(self, *args):
            add(self, *args)
            self.lines.flush()  # so that the file is ahead of the checkpoint

        patch.setattr(train, "optimizer_step", dying)
        patch.setattr(ledger.Ledger, "add", at_once)
        with pytest.raises(kit.RankFailed):
            kit.run_training(2, tmp_path / "run", *recipe(files))
    assert lines(tmp_path / "run")[-1]["step"] == 26
    run = kit.run_training(3, tmp_path / "run", *recipe(files))
    assert "Resuming from step 20 (" in (tmp_path / "run.out" / "rank0.txt").read_text()
    assert lines(run.folder) == lines(one)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_says_0_where_all_is_the_same(one):
    assert command(one) == (0, f"the same examples in all {STEPS} steps as the plan\n")
    assert command(one, one) == (0, f"the same examples in all {STEPS} steps as {one}\n")


def test_the_command_says_1_and_names_the_first_step_that_differs(one, tmp_path):
    found = lines(one)
    found[17], found[18] = (found[a] | {"step": b} for a, b in ((18, 17), (17, 18)))  # two steps change places
    other = written(tmp_path / "other", found)
    code, text = command(other)
    assert code == 1
    assert text.startswith("step 17 differs: 32 examples, hash")
    assert text.endswith("in the plan\n")
    code, text = command(one, other)
    assert code == 1
    assert text.startswith(
        f"step 17 differs: 32 examples, hash {lines(one)[17]['ids']} in {one}; 32, {found[17]['ids']}"
    )


def test_the_command_says_2_where_there_is_nothing_to_compare(one, tmp_path):
    for argv in ([], [one, one, one], ["--help"]):
        assert command(*argv) == (
            2,
            "error: give one run folder, or two: python -m src.reporting.ledger RUN [OTHER]\n",
        )
    code, text = command(tmp_path / "none")
    assert code == 2
    assert f"error: {tmp_path / 'none'} holds no ledger.jsonl with a step in it" in text
    assert command(one, tmp_path)[0] == 2


def test_a_step_that_is_missing_or_only_in_one_run_is_named(one, tmp_path):
    found = lines(one)
    gap = written(tmp_path / "gap", found[:9] + found[10:])
    assert ledger.compare(gap) == f"{gap}: step 9 is missing"
    short = written(tmp_path / "short", found[:-2])
    assert ledger.compare(short) is None  # a run that is under way
    assert ledger.compare(one, short) == f"step {STEPS - 1} is only in {one}"
    assert ledger.compare(short, one) == f"step {STEPS - 1} is only in {one}"
    assert ledger.compare(one, gap) == f"step 9 is only in {one}"


def test_half_a_line_at_the_end_is_no_step(one, tmp_path):
    torn = written(tmp_path / "torn", lines(one)[:20])
    with (torn / "ledger.jsonl").open("a") as file:
        file.write('{"step": 20, "exam')
    assert ledger.compare(torn) is None
    empty = written(tmp_path / "empty", [])
    with pytest.raises(UsageError):
        ledger.compare(empty)


# ---- mutants ---------------------------------------------------------------------------------------------------------


def from_the_start(config, rank, world, start, stop, order=data_loader.training_order):
    """The order replayed from its start after a resume, as after accelerate's load_state."""
    return (replace(item, step=item.step + start) for item in order(config, rank, world, 0, stop - start))


def another_seed(config, *rest, order=data_loader.training_order):
    return order(replace(config, seed=config.seed + 1), *rest)


def the_first_ranks(config, rank, *rest, order=data_loader.training_order):
    """Every rank reads what the first one reads, as without a distributed sampler."""
    return order(config, 0, *rest)


def same_every_epoch(config, rank, world, start, stop, order=data_loader.training_order):
    """No set_epoch: the order of the first epoch again and again."""
    return (item for step in range(start, stop) for item in order(config, rank, world, step % 32, step % 32 + 1))


@pytest.mark.parametrize(
    "mutant, world, first",
    [(another_seed, 1, 1), (the_first_ranks, 2, 1), (same_every_epoch, 1, 33)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_mutants_of_the_order_are_caught(files, one, tmp_path, monkeypatch, mutant, world, first):
    monkeypatch.setattr(data_loader, "training_order", mutant)
    run = kit.run_training(world, tmp_path / "run", *recipe(files))
    assert ledger.compare(run.folder).startswith(f"step {first} differs: ")
    assert ledger.compare(one, run.folder).startswith(f"step {first} differs: ")


def test_mutant_that_goes_on_with_the_wrong_data_is_caught(files, tmp_path, monkeypatch):
    flags = {"lr_scheduler_type": "constant"}
    kit.run_training(1, tmp_path / "run", *recipe(files, max_steps=6, **flags))
    monkeypatch.setattr(data_loader, "training_order", from_the_start)
    run = kit.run_training(1, tmp_path / "run", *recipe(files, max_steps=9, **flags))
    assert ledger.compare(run.folder).startswith("step 7 differs: ")
