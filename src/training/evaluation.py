"""Evaluation: every example once, the same result to the last bit on any number of processes.

Tests: tests/training/test_evaluation.py and tests/conformance/.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch

from src.config.schema import RunConfig
from src.data.batch_plan import MicroBatch, evaluation_order
from src.data.data_loader import read_batches, seed_everything
from src.distributed.strategies import is_sharded
from src.distributed.tensor_parallel import data_parallel_rank_and_size
from src.runtime import console
from src.tasks import Task

FLUSH = 64  # micro-batches whose sums wait on the device before they are copied to the host
ASK = 8  # micro-batches between two questions to all ranks whether to stop


@torch.no_grad()
def evaluate(
    accelerator, host_group, module: torch.nn.Module, task: Task, split, cfg: RunConfig, stopping=None
) -> dict | None:
    """Return loss (sum of losses / sum of weights), weight, examples and the task's metrics, the same on every rank.

    With `stopping`, which says 1 on a rank that wants to stop, all ranks may leave early alike; the result is None.

    Bitwise the same for any number of processes on one kind of device: the cut into micro-batches, each one's sums
    and the order in which they are added do not depend on it. Held in memory: a few numbers per micro-batch.
    """
    # The bare module: a replica's forward is no collective, and ranks may run different numbers of them. Where the model is
    # sharded, all run as many, and what a filler comes to is thrown away.
    module = accelerator.unwrap_model(module)
    order, shift, parts = _order(split, cfg)
    rank, world = data_parallel_rank_and_size(accelerator)
    examples, rounds = sum(count for _, _, count in parts), -(-len(order) // world)
    mine = order[rank::world]
    if is_sharded(accelerator):
        mine += [replace(order[0], dummy=True)] * (rounds - len(mine))
    names, table, rows, pending = [], None, {}, []

    def flush():
        nonlocal names, table
        for micro, batch, out in pending:
            sums = {k: v for k, v in out.items() if v.dim() == 0} | batch.sums
            names = names or ["weight", *sorted(sums)]
            table = np.zeros((len(order), len(names))) if table is None else table
            table[micro.index] = [batch.weight, *(float(sums[name]) for name in names[1:])]
            for name, values in ((k, v) for k, v in out.items() if v.dim() == 1):
                rows.setdefault(name, np.zeros(examples))[micro.ids - shift[micro.index]] = values.cpu().numpy()
            rows.setdefault("times seen", np.zeros(examples))[micro.ids - shift[micro.index]] += 1
        pending.clear()

    training = module.training
    module.eval()
    with _one_thread(accelerator.device), _uncompiled(cfg):
        pin = accelerator.device.type == "cuda"
        bar = console.bar("evaluation", len(mine), "batch", shown=accelerator.is_main_process)
        batches = iter(read_batches(split, task, iter(mine), cfg, pin))
        for turn in range(rounds):
            if stopping and turn % ASK == 0 and host_group.sum([stopping()])[0]:
                module.train(training)
                bar.close()
                return None
            micro, batch = next(batches, (None, None))
            if micro is None:
                continue
            seed_everything(micro.seed)
            inputs = {name: value.to(accelerator.device, non_blocking=True) for name, value in batch.inputs.items()}
            out = module(inputs)
            if not micro.dummy:
                pending.append((micro, batch, out))
            bar.update()
            if len(pending) == FLUSH:
                flush()
        flush()
    bar.close()
    module.train(training)
    return _combine(accelerator, host_group, task, names, table, rows, len(order), parts)


def _order(split, cfg: RunConfig) -> tuple[list[MicroBatch], list[int], list[tuple[str, slice, int]]]:
    """Return the micro-batches of all sources; for each, how far its ids are from places among the evaluated examples; and
    (name, its micro-batches, examples) of each source."""
    order, shift, parts, place = [], [], [], 0
    for name, first, part in split.segments():
        count = min(len(part), cfg.max_eval_examples or len(part))
        begun = len(order)
        for micro in evaluation_order(count, cfg.per_device_eval_batch_size, cfg.seed, part.lengths):
            order.append(replace(micro, ids=micro.ids + first, index=len(order)))
            shift.append(first - place)
        parts.append((name, slice(begun, len(order)), count))
        place += count
    return order, shift, parts


def _combine(accelerator, host_group, task, names, table, rows, micro_batches: int, parts) -> dict:
    """Return the eval line from every rank's part of the table of sums; of a mixture, also the numbers of each source."""
    examples = sum(count for _, _, count in parts)
    names, kinds = _same_names(accelerator, names, sorted(rows))
    table = np.zeros((micro_batches, len(names))) if table is None else table
    table = host_group.sum(table).numpy()  # each entry is one rank's number plus zeros, so it stays what it was
    rows = {name: host_group.sum(rows.get(name, np.zeros(examples))).numpy() for name in kinds}
    seen = rows.pop("times seen")
    assert (seen == 1).all(), "an example was evaluated more than once, or not at all"
    line = _numbers(task, names, table, examples)
    if parts[0][0]:  # the sources of a mixture, which have names, though it may be one that has evaluation data
        each = {name: _numbers(task, names, table[which], count) for name, which, count in parts}
        # What one source does not know (the bytes of rows of ids) is not known of all.
        line = {key: value for key, value in line.items() if all(key in one for one in each.values() if one["weight"])}
        line |= {f"{name}/{key}": value for name, one in each.items() for key, value in one.items()}
    if rows:
        line |= _on_main(accelerator, lambda: task.row_metrics({name: _whole(values) for name, values in rows.items()}))
    return line


def _numbers(task, names: list[str], table: np.ndarray, examples: int) -> dict:
    """Return loss, weight, examples and the task's metrics from the sums of some micro-batches."""
    total = dict(zip(names, np.cumsum(table, axis=0)[-1].tolist(), strict=True))  # cumsum adds in order, one by one
    weight = total.pop("weight")
    line = {"loss": total["loss"] / weight if weight else float("nan"), "weight": weight, "examples": examples}
    return line | (task.metrics(total, weight) if weight else {})


def _whole(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int64) if (values % 1 == 0).all() else values


def _on_main(accelerator, compute) -> dict:
    """Return on every rank what the main process computes, so that all can decide by it alike."""
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([compute() if accelerator.is_main_process else None])[0]


def _same_names(accelerator, names: list[str], kinds: list[str]) -> tuple[list[str], list[str]]:
    """Return the names of the first rank that had anything to evaluate: with few examples some ranks have nothing."""
    if accelerator.num_processes == 1:
        return names, kinds
    from accelerate.utils import gather_object

    return max(gather_object([(names, kinds)]), key=lambda found: len(found[0]))


def _uncompiled(cfg: RunConfig):
    """Run compiled layers as they are written: then eval.py finds the same number, and no graph is made for evaluation."""
    return torch.compiler.set_stance("force_eager") if cfg.compile else nullcontext()


@contextmanager
def _one_thread(device: torch.device):
    """Hold a CPU to one thread: the last bit of a matrix product depends on how many share it.

    Costs the other cores; more processes use them (make eval NPROC=4), and the number does not move."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
