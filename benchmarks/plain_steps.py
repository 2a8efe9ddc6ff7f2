"""The steps of the batch plan as padded tensors in memory, for the plain loop of benchmarks/loop.py."""

from collections.abc import Iterator

import numpy as np
import torch

from engine.plan.batch_plan import PlanConfig, training_order
from engine.plan.data_loader import BatchReader, group_by_step


def steps_in_memory(run, task, split, accelerator) -> Iterator[tuple[list[dict], float]]:
    """Yield (batches of this rank, weight on all ranks) for every step of the batch plan."""
    ranks = accelerator.num_processes
    config = PlanConfig(len(split), run.global_batch_size, run.per_device_batch_size, run.seed, split.lengths)
    orders = [training_order(config, r, ranks, 0, run.max_steps) for r in range(ranks)]
    steps = [group_by_step(map(BatchReader(split, task, training=True).__getitem__, order)) for order in orders]
    while True:
        step = [next(batches)[0] for batches in steps]
        weight = sum(batch.weight for batches in step for micro, batch in batches if not micro.dummy)
        yield [for_plain(split, *item) for item in step[accelerator.process_index]], weight


def for_plain(split, micro, batch) -> dict[str, torch.Tensor]:
    """Return the inputs of the plain loop for a micro-batch."""
    ids, lengths = batch.inputs["input_ids"], torch.from_numpy(split.lengths[micro.ids].astype(np.int64))
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "targets": batch.inputs["targets"]}
