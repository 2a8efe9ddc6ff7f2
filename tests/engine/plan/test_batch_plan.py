"""The plan is a pure function: every id once, the same for any world size, entered anywhere at once."""

import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from engine.plan.batch_plan import PlanConfig, StepSizes, assign_to_ranks, plan, training_order
from engine.plan.row_order import BLOCK, epoch_order, permute

LENGTHS = 3 + (94 * np.random.default_rng(0).random(1003) ** 2.5).astype(int)


@pytest.mark.parametrize("start, stop", [(0, 7), (BLOCK - 3, BLOCK + 5), (BLOCK, 2 * BLOCK), (5, 3 * BLOCK)])
def test_epoch_order_by_blocks_equals_permutation(start, stop):
    assert np.array_equal(epoch_order(start, stop, 70_001, 3, 1), permute(np.arange(start, stop), 70_001, 3, 1))


def test_epoch_order_looks_random():
    """Neighbours are no nearer than chance, positions and ids are uncorrelated, and every id reaches every place."""
    n = 4099
    order = permute(np.arange(n), n, 3, 5)
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.05
    assert abs(np.abs(np.diff(order)).mean() / (n / 3) - 1) < 0.05
    firsts = [int(permute(np.array([0]), 10, 0, epoch)[0]) for epoch in range(2000)]
    counts = np.bincount(firsts, minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9  # chi-squared with 9 degrees of freedom, p = 0.001


def test_sorting_by_length_leaves_little_padding():
    n = 20_000
    lengths = 3 + (94 * np.random.default_rng(1).random(n) ** 2.5).astype(int)

    def padding(step_lengths):
        real = rectangle = 0
        for step in range(StepSizes(n, 64).per_epoch):
            for micro in plan(PlanConfig(n, 64, 4, 0, step_lengths), 0, step):
                real += lengths[micro.ids].sum()
                rectangle += lengths[micro.ids].max() * len(micro.ids)
        return 1 - real / rectangle

    assert padding(lengths) <= 0.075
    assert padding(None) > 0.45  # the mutant: a random cut


def test_plan_cuts_by_cost_or_equal_counts():
    """Both have the same rows in each step; a multiple that rows are padded to counts as padding."""
    cost = PlanConfig(1003, 64, 8, 0, LENGTHS)
    equal = replace(cost, by_cost=False)
    coarse = replace(cost, multiple_of=64)
    by_config = {config: plan(config, 0, 3) for config in (cost, equal, coarse)}
    ids = [sorted(np.concatenate([m.ids for m in parts]).tolist()) for parts in by_config.values()]
    assert ids[0] == ids[1] == ids[2]
    assert [len(parts) for parts in by_config.values()] == [8, 8, 8]
    assert [len(m.ids) for m in by_config[equal]] == [8] * 8
    assert len({len(m.ids) for m in by_config[cost]}) > 1
    assert sum(m.cost for m in by_config[cost]) < 0.95 * sum(m.cost for m in by_config[equal])
    widest = -(-LENGTHS.max() // 64) * 64
    for micro in by_config[coarse]:
        assert -(-LENGTHS[micro.ids].max() // 64) * 64 * len(micro.ids) <= 8 * widest


def test_token_balanced_assignment():
    """No rank has more than a few percent above the mean; the mutant, dealing in order, has far more."""
    worst = naive = 0.0
    for step in range(30):
        micro_batches = plan(PlanConfig(1003, 64, 4, 0, LENGTHS), 0, step % 15)
        mean = sum(m.cost for m in micro_batches) / 4
        worst = max(worst, max(sum(m.cost for m in w) for w in assign_to_ranks(micro_batches, 4)) / mean)
        naive = max(naive, max(sum(m.cost for m in micro_batches[4 * r : 4 * r + 4]) for r in range(4)) / mean)
    assert worst < 1.1
    assert naive > 1.5


def test_billion_examples_cost_no_memory_or_time():
    config = PlanConfig(10**9, 1024, 8, 0)
    tracemalloc.start()
    started = time.process_time()
    micro_batches = plan(config, 1, 10**7 % (10**9 // 1024))
    first = next(training_order(config, 3, 64, 10**7, 10**7 + 1))  # step 10^7 is in the eleventh epoch
    assert time.process_time() - started < 1
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()
    assert first.step == 10**7
    ids = np.concatenate([m.ids for m in micro_batches])
    assert len(set(ids.tolist())) == 1024
    assert ids.min() >= 0
    assert ids.max() < 10**9


@pytest.mark.parametrize("case", range(24))
def test_epoch_is_the_dataset_for_any_split_and_resume(case):
    rng = np.random.default_rng(case)
    n, batch, epoch = int(rng.integers(1, 300)), int(rng.integers(1, 70)), int(rng.integers(0, 3))
    lengths = rng.integers(1, 60, n)
    per_epoch = StepSizes(n, batch).per_epoch
    first, stop = epoch * per_epoch, (epoch + 1) * per_epoch
    resumed = int(rng.integers(first, stop + 1))
    seen, seeds = [], []
    for begin, end in ((first, resumed), (resumed, stop)):  # each part with another where
        world, micro = int(rng.integers(1, 6)), int(rng.integers(1, batch + 1))
        tokens = int(rng.integers(60, 400)) if rng.random() < 0.5 else None
        for rank in range(world):
            for m in training_order(PlanConfig(n, batch, micro, case, lengths, tokens), rank, world, begin, end):
                assert tokens is None or m.cost <= tokens
                seen += [] if m.dummy else m.ids.tolist()
                seeds += [] if m.dummy else [m.seed]
    assert sorted(seen) == list(range(n))
    assert len(set(seeds)) == len(seeds)
