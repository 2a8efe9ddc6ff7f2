"""A run may be killed anywhere, any number of times, and resumed on any number of processes: the numbers stay the same."""

import os
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

import train
from engine.distributed.backends import Backend
from engine.distributed.host_group import HostGroup
from engine.plan import data_loader, seeding
from engine.plan.row_order import example_ids
from src.tasks import causal_lm
from tests.helpers import kit
from tests.helpers.killing import train_until_killed

STEPS = 26  # of 8 examples: the shorter tails of the epochs, of 3 examples, are steps 11 and 22


def recipe(tiny, **fields) -> list[str]:
    values = {"global_batch_size": 8, "per_device_batch_size": 2, "per_device_eval_batch_size": 4}
    values |= {"max_steps": STEPS, "learning_rate": 3e-3, "logging_steps": 1, "eval_steps": 9, "save_steps": 2}
    return kit.flags(**tiny | values | fields)


# ---- other numbers of processes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory) -> kit.Run:
    """An undisturbed run on one process, in float64, with dropout."""
    return kit.run_training(1, tmp_path_factory.mktemp("whole") / "run", *recipe(tiny, dtype="float64"))


def assert_same(run: kit.Run, whole: kit.Run) -> None:
    """Equal are the examples of every step and, within rounding, weights (so also dropout masks) and all lines."""
    assert kit.first_other_step(run.folder, whole.folder) is None
    assert kit.first_other_step(run.folder) is None
    assert kit.distance(run.weights, whole.weights) <= 1e-10
    for one, other in zip(kit.timeless(run.folder), kit.timeless(whole.folder), strict=True):
        assert list(one) == list(other)
        assert one.pop("kind") == other.pop("kind")
        assert one == pytest.approx(other, rel=1e-9, abs=1e-9)


def test_killed_on_two_then_one_and_finished_on_four(tiny, whole, tmp_path):
    """Killed in the middle of the epoch (step 7), then in its tail (step 11), with which four ranks begin; they are killed
    in the first step of the third epoch, and begin again with the checkpoint of the end of the second."""
    flags, folder = recipe(tiny, dtype="float64"), tmp_path / "run"
    for step, world in ((7, 2), (11, 1), (23, 4)):
        train_until_killed(step, world, folder, *flags)
    assert "step_00000010" in (tmp_path / "run.out" / "rank0.txt").read_text()
    assert_same(kit.run_training(4, folder, *flags), whole)
    assert "step_00000022" in (tmp_path / "run.out" / "rank0.txt").read_text()
    assert len(kit.ledger_text(folder).splitlines()) == 1 + STEPS


@pytest.fixture(scope="module")
def begins_without_targets(tiny, tmp_path_factory) -> dict:
    """Rows; the first step of an epoch gets those of one token, which have no target."""
    folder = tmp_path_factory.mktemp("rows")
    ids = set(example_ids(0, 8, 83, 42, 0).tolist())
    rows = [{"input_ids": [1] if i in ids else list(range(2, 12 + i % 9))} for i in range(83)]
    return tiny | {"train_file": kit.write_jsonl(folder / "rows.jsonl", rows)}


SLOW = [pytest.param(case, marks=pytest.mark.cluster) for case in ("hard_examples", "stream")]


@pytest.mark.parametrize("case", ["", "no targets before", "the last step", *SLOW])
def test_three_ranks_resume_bitwise(tiny, begins_without_targets, tmp_path, monkeypatch, case):
    """Three ranks round a sum by its place in DDP's buckets, which change after the first backward pass of a process.

    Mutant: a process computes its first gradient once."""
    fields, step = {"dtype": "float64", "logging_steps": 3, "save_steps": 1, "save_total_limit": 99}, 6
    if case == "hard_examples":  # it computes the gradient itself
        kit.need_addon("techniques/hard_examples")
        fields["techniques"] = '{"hard_examples": {"share": 0.5}}'
        fields["model_config"] = kit.write_yaml(tmp_path / "model.yaml", kit.TINY | {"n_embd": 96, "n_layer": 2})
    if case == "no targets before":
        tiny, step = begins_without_targets, 1
    if case == "the last step":
        step = STEPS - 1
    if case == "stream":
        kit.need_addon("streaming")
        rows = [{"input_ids": [1 + i % 40, 7, *range(2, 5 + i % 9)]} for i in range(83)]
        files = [kit.write_jsonl(tmp_path / f"{i}.jsonl", rows[i::4]) for i in range(4)]
        fields |= {"streaming": True, "train_file": files}
    flags = recipe(tiny, **fields)
    whole = kit.run_training(3, tmp_path / "whole", *flags)
    run = kit.run_training(3, kit.rewind(whole.folder, step, tmp_path / "run"), *flags)
    said = (tmp_path / "run.out" / "rank0.txt").read_text()
    assert f"Resuming from step {step} " in said
    assert f"steps up to {STEPS} were not saved" in said  # the loss is named
    assert kit.same(run.weights, whole.weights)
    assert kit.timeless(run.folder) == kit.timeless(whole.folder)
    if not case:
        monkeypatch.setattr(Backend, "reorders_buckets", False)
        mutant = kit.run_training(3, kit.rewind(whole.folder, step, tmp_path / "mutant"), *flags)
        assert not kit.same(mutant.weights, whole.weights)


def _count_gradients(argv) -> int:
    """Train; return how many gradients this rank has computed."""
    compute, calls = train.compute_gradient, []
    train.compute_gradient = lambda *args: (calls.append(1), compute(*args))[1]
    train.main([str(word) for word in argv])
    return len(calls)


@pytest.mark.parametrize(
    "world, fields, gradients",
    [
        (3, {}, 3),
        (2, {}, 2),  # the order of two numbers changes no sum
        (3, {"ddp_find_unused_parameters": True}, 2),  # DDP keeps its buckets
        (3, {"ddp_comm_hook": "power_sgd"}, 2),  # it keeps the error of each step
    ],
)
def test_only_buckets_that_are_reordered_cost_a_second_gradient(tiny, tmp_path, world, fields, gradients):
    argv = recipe(tiny, max_steps=2, output_dir=tmp_path / "run", **fields)
    assert kit.spawn(world, _count_gradients, argv, out=tmp_path / "out") == [gradients] * world


def _sums_alone_and_together() -> list[int]:
    """Return how many of 200 numbers have another sum over all ranks alone than in one vector, by both ways to sum."""
    hosts = HostGroup(Accelerator(cpu=True), timeout=60)
    assert dist.get_world_size() == 3
    values = np.random.default_rng(dist.get_rank()).random(200).tolist()
    differing = []
    for add in (hosts.sum_in_order, hosts.sum):
        together = add(values).tolist()
        differing.append(sum(add([value]).item() != whole for value, whole in zip(values, together, strict=True)))
    return differing


def test_losses_are_summed_alike_in_vectors_of_any_length(tmp_path):
    """A save sums the losses since the last line, so the vector of the next line is shorter. Mutant: an all-reduce."""
    for in_order, reduced in kit.spawn(3, _sums_alone_and_together, out=tmp_path):
        assert in_order == 0
        assert reduced > 0


def test_mutant_dropout_seeded_by_rank_is_caught(tiny, whole, tmp_path, monkeypatch):
    original = seeding.seed_everything
    monkeypatch.setattr(seeding, "seed_everything", lambda seed: original(seed + int(os.environ["RANK"])))
    run = kit.run_training(2, tmp_path / "run", *recipe(tiny, dtype="float64"))
    assert kit.distance(run.weights, whole.weights) > 1e-6
    assert kit.first_other_step(run.folder, whole.folder) is None  # the examples were right: only the masks differ


def test_mutant_batches_replayed_from_the_start_are_caught(tiny, whole, tmp_path, monkeypatch):
    def replayed(config, rank, world, start, stop, original=data_loader.training_order):
        return original(config, rank, world, 0, stop - start)

    flags, folder = recipe(tiny, dtype="float64"), tmp_path / "run"
    train_until_killed(7, 2, folder, *flags)
    monkeypatch.setattr(data_loader, "training_order", replayed)
    kit.run_training(1, folder, *flags)
    assert kit.first_other_step(folder, whole.folder) == 7


# ---- collators that draw random numbers --------------------------------------------------------------------------------


def masking(monkeypatch) -> None:
    """Let the collator replace random tokens, drawn from torch, numpy and random, as for masked language models."""
    original = causal_lm.Task.collate

    def collate(self, rows, training):
        batch = original(self, rows, training)
        ids = batch.inputs["input_ids"]
        hidden = (torch.rand(ids.shape) < 0.1) | torch.from_numpy(np.random.random(ids.shape) < 0.1)
        hidden |= torch.tensor([[random.random() < 0.1] for _ in ids])
        return batch._replace(inputs=batch.inputs | {"input_ids": ids.masked_fill(hidden, 0)})

    monkeypatch.setattr(causal_lm.Task, "collate", collate)


def test_random_collator_is_bitwise_the_same_after_a_kill(tiny, tmp_path, monkeypatch):
    """Undisturbed it runs in the training process; killed and resumed, also in two loader processes."""
    unmasked = kit.run_training(2, tmp_path / "unmasked", *recipe(tiny))
    masking(monkeypatch)
    straight = kit.run_training(2, tmp_path / "straight", *recipe(tiny))
    assert not kit.same(unmasked.weights, straight.weights)
    for workers in (0, 2):
        flags, folder = recipe(tiny, dataloader_num_workers=workers), tmp_path / f"run{workers}"
        train_until_killed(10, 2, folder, *flags)
        assert kit.same(kit.run_training(2, folder, *flags).weights, straight.weights)
        assert kit.timeless(folder) == kit.timeless(straight.folder)


# ---- train lines that a kill interrupts --------------------------------------------------------------------------------


def test_interrupted_train_lines_are_bitwise_the_same(tiny, tmp_path, monkeypatch):
    """Saved at steps 5, 10, …, logged at 7, 14, …: the sums of an unfinished line are part of a checkpoint.

    The mutant forgets them: a healthy run, with a wrong line."""
    from engine.run.meter import Meter

    flags = recipe(tiny, logging_steps=7, save_steps=5)
    straight = kit.run_training(2, tmp_path / "straight", *flags)
    for at in (9, 18):
        train_until_killed(at, 2, tmp_path / "run", *flags)
    run = kit.run_training(2, tmp_path / "run", *flags)
    assert [line["step"] for line in run.kind("train")] == [7, 14, 21, 26]
    assert kit.timeless(run.folder) == kit.timeless(straight.folder)
    assert kit.same(run.weights, straight.weights)
    train_until_killed(13, 2, tmp_path / "mutant", *flags)
    monkeypatch.setattr(Meter, "resume", lambda self, state: None)
    mutant = kit.run_training(2, tmp_path / "mutant", *flags)
    assert kit.same(mutant.weights, straight.weights)
    assert kit.timeless(mutant.folder) != kit.timeless(straight.folder)
