"""The batch plan: the examples, micro-batch and seed of every step.

Functions of the plan and the step: no torch, no processes, no files.
Tests: tests/engine/plan/test_batch_plan.py and tests/conformance/.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from engine.config.find_addons import first_answer
from engine.config.run_config import RunConfig
from engine.plan.length_cuts import split_by_cost, split_by_tokens, split_equally
from engine.plan.row_order import Quotas, example_ids, splitmix64
from engine.plan.seeding import derive_seed


@dataclass(frozen=True)
class StepSizes:
    """The positions of an epoch that each step takes: the last step of an epoch takes the remaining ones.

    An add-on may derive other sizes from this class. It must find any step in O(1)."""

    num_examples: int
    global_batch: int

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch. The last one holds the remaining examples."""
        return -(-self.num_examples // self.global_batch)

    def locate(self, step: int) -> tuple[int, int]:
        """Return (epoch, step in the epoch) of step `step` of the run, both counted from 0."""
        return divmod(step, self.per_epoch)

    def first_step(self, epoch: int) -> int:
        """Return the number of steps before an epoch."""
        return epoch * self.per_epoch

    def positions(self, epoch: int, within: int) -> tuple[int, int]:
        """Return the first position of a step in its epoch, and the one after its last."""
        start = within * self.global_batch
        return start, min(start + self.global_batch, self.num_examples)

    def steps_of(self, epochs: float) -> int:
        """Return the number of steps in `epochs` epochs; a part of an epoch is a part of its steps, rounded up."""
        return math.ceil(round(epochs * self.per_epoch, 6))

    def epochs_of(self, step: int) -> float:
        """Return the number of epochs finished after `step` steps."""
        return step / self.per_epoch


def sizes_of_run(cfg: RunConfig, num_examples: int) -> StepSizes:
    """Return the sizes of the steps of a run with `num_examples` draws per epoch."""
    sizes = first_answer(each.step_sizes(cfg, num_examples) for each in cfg.addons)
    return StepSizes(num_examples, cfg.global_batch_size) if sizes is None else sizes


def epochs_at(cfg: RunConfig, train_set: Any, step: int) -> float:
    """Return the number of epochs finished after `step` steps: passes that a stream has counted, else by the plan."""
    if hasattr(train_set, "epoch_at"):
        return train_set.epoch_at(step, cfg)
    return sizes_of_run(cfg, len(train_set)).epochs_of(step)


# ---- micro-batches ---------------------------------------------------------------------------------------------------


def draw_ids(config: "PlanConfig", epoch: int, start: int, stop: int) -> np.ndarray:
    """Return the ids that are drawn at positions start … stop−1 of an epoch: each row once, or by the quotas."""
    return example_ids(start, stop, config.num_examples, config.seed, epoch, config.quotas)


Ids = Callable[["PlanConfig", int, int, int], np.ndarray]


@dataclass(frozen=True, eq=False)
class PlanConfig:
    """All inputs, besides the step number, that determine the examples of a step and their micro-batches.

    The last four are what an add-on may replace by its own (`change_plan` in engine/config/addon.py)."""

    num_examples: int  # draws per epoch
    global_batch: int
    micro_batch: int
    seed: int
    lengths: Sequence[int] | np.ndarray | None = None  # by id; read for the ids of one step only
    max_tokens: int | None = None  # per micro-batch, padding included; replaces micro_batch
    by_cost: bool = True  # cut rows with lengths at the least padding; False: into equal counts of rows
    multiple_of: int = 1  # rows are padded to a multiple of this many tokens
    quotas: Quotas | None = None  # for a mixture
    step_sizes: StepSizes | None = None  # None: global_batch examples per step
    draw: Ids = draw_ids  # the rows at given positions of an epoch
    ids: Ids | None = None  # the rows of the step at given positions; None: those drawn there
    max_length: Callable[[int], int] | None = None  # step, counted from 0 -> tokens that are left of a longer row

    @property
    def sizes(self) -> StepSizes:
        return self.step_sizes or StepSizes(self.num_examples, self.global_batch)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Input of one forward pass: example ids, and the seed of all randomness inside it."""

    ids: np.ndarray
    seed: int
    step: int = 0  # optimizer step since the start of the run
    index: int = 0  # position in the step's plan
    cost: int = 0  # tokens including padding, or rows if lengths are unknown
    last: bool = True  # last micro-batch of the rank in its step: gradients are reduced after it
    dummy: bool = False  # weight zero; run because every rank must take part in the reduction
    hash: tuple[float, float] = (0.0, 0.0)  # `hash_ids` of its ids; of a micro-batch that was read for training


def plan(config: PlanConfig, epoch: int, step: int) -> list[MicroBatch]:
    """Return the micro-batches of step `step` of epoch `epoch`, the same for any number of processes.

    With lengths, the global batch is sorted by length before it is split, so rows of similar length are padded
    together. The sum over the global batch, and so the gradient, does not depend on the split.
    """
    start, stop = config.sizes.positions(epoch, step)
    ids = (config.ids or config.draw)(config, epoch, start, stop)
    of_run = config.sizes.first_step(epoch) + step
    max_length = config.max_length(of_run) if config.max_length else None
    parts = split_into_micro_batches(ids, config, config.lengths, max_length)
    return [
        MicroBatch(part, derive_seed("micro-batch", config.seed, epoch, step, j), of_run, j, cost)
        for j, (part, cost) in enumerate(parts)
    ]


def split_into_micro_batches(
    ids: np.ndarray, config: PlanConfig, lengths=None, max_length: int | None = None
) -> list[tuple[np.ndarray, int]]:
    """Split `ids` into (part, cost) pairs; with `lengths`, by id, longest rows first.

    A part has `micro_batch` rows (the last part may have fewer). With lengths, it has so many on average if the cut is
    `by_cost`, or at most `max_tokens` tokens including padding. Rows are shortened to `max_length` tokens first."""
    if lengths is None:
        bounds = split_equally(len(ids), config.micro_batch)
        return [(ids[a:b], b - a) for a, b in pairwise(bounds)]
    by_row = np.asarray(lengths[ids]).astype(np.int64)
    if max_length is not None:
        by_row = np.minimum(by_row, max_length)
    order = np.argsort(-by_row, kind="stable")
    ids = ids[order]
    by_row = by_row[order]
    if config.max_tokens:
        bounds = split_by_tokens(by_row, config.max_tokens)
    elif config.by_cost:
        padded = -(-by_row // config.multiple_of) * config.multiple_of
        bounds = split_by_cost(padded, config.micro_batch)
    else:
        bounds = split_equally(len(ids), config.micro_batch)
    return [(ids[a:b], int(by_row[a]) * (b - a)) for a, b in pairwise(bounds)]


def assign_to_ranks(micro_batches: list[MicroBatch], world_size: int) -> list[list[MicroBatch]]:
    """Return each rank's micro-batches of a step. Costs are balanced, counts differ by at most one, and none is 0.

    Micro-batches, most expensive first, go to the least loaded rank that has room (longest processing time first). A
    rank without a micro-batch gets a dummy batch of weight zero, because every rank must take part in the reduction.
    """
    room = -(-len(micro_batches) // world_size)
    of_rank = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for micro in sorted(micro_batches, key=lambda m: -m.cost):
        rank = min((r for r in range(world_size) if len(of_rank[r]) < room), key=lambda r: (loads[r], r))
        of_rank[rank].append(replace(micro, last=False))
        loads[rank] += micro.cost
    dummy = replace(micro_batches[-1], ids=micro_batches[-1].ids[:2], dummy=True)  # two: batch norm refuses one row
    for batch in of_rank:
        batch[-1:] = [replace(batch[-1] if batch else dummy, last=True)]
    return of_rank


def training_order(config: PlanConfig, rank: int, world_size: int, start: int, stop: int) -> Iterator[MicroBatch]:
    """Yield one rank's micro-batches of optimizer steps start … stop−1. Starting at any step is O(1)."""
    for step in range(start, stop):
        epoch, within = config.sizes.locate(step)
        yield from assign_to_ranks(plan(config, epoch, within), world_size)[rank]


def evaluation_order(
    cfg: RunConfig, by_cost: bool, num_examples: int, lengths=None, block: int | None = None
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of an evaluation: every id once, sorted by length within blocks of `block` rows.

    `by_cost`: the `cut_by_cost` of the task. By default, a block is 64 micro-batches. No micro-batch has rows of two
    blocks."""
    micro_batch = cfg.per_device_eval_batch_size
    config = PlanConfig(
        num_examples,
        num_examples,
        micro_batch,
        cfg.seed,
        lengths,
        by_cost=by_cost,
        multiple_of=cfg.pad_to_multiple_of or 1,
    )
    block = block or 64 * micro_batch
    index = 0
    for start in range(0, num_examples, block):
        ids = np.arange(start, min(start + block, num_examples))
        for part, cost in split_into_micro_batches(ids, config, lengths):
            yield MicroBatch(part, derive_seed("evaluation", cfg.seed, index), index=index, cost=cost)
            index += 1


LOW = np.uint64(0xFFFFFFFF)


def hash_ids(ids: np.ndarray) -> tuple[float, float]:
    """Return two sums over hashes of `ids`. Summed over ranks, they are the same for any split and order of the ids.

    Each hash has 32 bits, so a float64 holds the sum of two million of them exactly."""
    hashed = splitmix64(np.asarray(ids).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return float((hashed & LOW).sum()), float((hashed >> np.uint64(32)).sum())
