"""Evaluation: every example exactly once, with bitwise the same result on any number of processes.

Tests: tests/training/test_evaluation.py and tests/conformance/.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from src.config.errors import Failure, UsageError, warn
from src.config.schema import RunConfig
from src.data.data_loader import read_batches, seed_everything
from src.distributed.strategies import Strategy
from src.runtime import console
from src.tasks import Task
from src.training.evaluation_plan import TIMES_SEEN, Results, Source, make_plan, share_of_rank

ASK = 8  # micro-batches between two all-reduces of the stop requests


@torch.no_grad()
def evaluate(
    strategy: Strategy,
    module: torch.nn.Module,
    task: Task,
    split,
    cfg: RunConfig,
    stopping: Callable[[], float] | None = None,
) -> dict | None:
    """Return loss (sum of losses / sum of weights), weight, examples and the task's metrics, the same on every rank.

    Return None if `stopping()` returned 1 on any rank. The result is bitwise the same for any number of processes on
    one kind of device, because the micro-batches, their sums and the order of adding these do not depend on that
    number. Memory: a few numbers per micro-batch.
    """
    plan = make_plan(split, cfg, task)
    accelerator, rounds = strategy.accelerator, -(-len(plan.micro_batches) // strategy.data_world_size)
    mine = share_of_rank(strategy, plan.micro_batches, rounds)
    results = Results(plan)
    # Without DDP's wrapper a forward pass is not a collective, so ranks may run different numbers of them.
    module = accelerator.unwrap_model(module)
    with _evaluating(module, cfg), _one_thread(accelerator.device):
        bar = console.bar("evaluation", len(mine), "batch", shown=accelerator.is_main_process)
        pin_memory = accelerator.device.type == "cuda"
        batches = iter(read_batches(split, task, iter(mine), cfg, pin_memory, training=False))
        for number in range(rounds):
            if stopping and number % ASK == 0 and strategy.hosts.sum([stopping()])[0]:
                bar.close()
                return None
            item = next(batches, None)
            if item is None:  # this rank has one micro-batch fewer than others
                continue
            micro, batch = item
            seed_everything(micro.seed)
            inputs = {name: value.to(accelerator.device, non_blocking=True) for name, value in batch.inputs.items()}
            out = module(inputs)
            if not micro.dummy:
                results.add(micro, batch, out)
            bar.update()
        results.flush()
        bar.close()
    return _combine(strategy, task, results)


# ---- results ---------------------------------------------------------------------------------------------------------


def _combine(strategy: Strategy, task: Task, results: Results) -> dict:
    """Return the eval line of metrics.jsonl from all ranks' results; for a mixture, also each source's metrics."""
    plan = results.plan
    names, columns = _names_on_all_ranks(strategy, results)
    table = np.zeros((len(plan.micro_batches), len(names))) if results.table is None else results.table
    table = strategy.hosts.sum(table).numpy()  # exact: each entry is one rank's number plus zeros
    values = {}
    for name, (shape, dtype) in columns.items():
        mine = results.per_example.get(name)
        total = strategy.hosts.sum(np.zeros((plan.examples, *shape)) if mine is None else mine)
        values[name] = total.numpy().astype(dtype, copy=False)
    assert (values.pop(TIMES_SEEN) == 1).all(), "an example was evaluated more than once, or not at all"
    if sums_by_block := getattr(task, "sums_by_block", None):  # a loss over a whole batch
        names, table = _on_main(strategy, lambda: sums_by_block(names, table, values, plan.blocks))
    line = _divide(task, names, table, plan.examples)
    if plan.sources[0].name:
        line = _with_sources(task, names, table, plan.sources, line)
    if values:
        line |= _on_main(strategy, lambda: task.row_metrics(values))
    # JSON knows no number of numpy, which a task's metrics may be.
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in line.items()}


def _with_sources(task: Task, names: list[str], table: np.ndarray, sources: list[Source], line: dict) -> dict:
    by_source = {s.name: _divide(task, names, table[s.rows], s.examples) for s in sources}
    with_targets = [numbers for numbers in by_source.values() if numbers["weight"]]
    # Drop a total that some source lacks: bits_per_byte, for example, is unknown for pretokenized rows.
    line = {key: value for key, value in line.items() if all(key in numbers for numbers in with_targets)}
    for name, numbers in by_source.items():
        line |= {f"{name}/{key}": value for key, value in numbers.items()}
    return line


def _divide(task: Task, names: list[str], table: np.ndarray, examples: int) -> dict:
    """Return loss, weight, examples and the task's metrics from a table of sums by micro-batch."""
    total = dict(zip(names, np.cumsum(table, axis=0)[-1].tolist(), strict=True))  # cumsum adds in order, one by one
    weight = total.pop("weight")
    line = {"loss": total["loss"] / weight if weight else float("nan"), "weight": weight, "examples": examples}
    return line | (task.metrics(total, weight) if weight else {})


def check_finite(metrics: dict, cfg: RunConfig, step: int) -> None:
    """Warn of metrics that are not finite; with stop_on_nan_metric raise Failure. Empty sets do not count, with whatever
    weights they were evaluated (ema/SOURCE/loss)."""
    empty = tuple(
        f"/{key.removesuffix('weight')}loss" for key, n in metrics.items() if key.endswith("weight") and not n
    )
    bad = [
        f"{name} is {value}"
        for name, value in metrics.items()
        if isinstance(value, float) and not np.isfinite(value) and not f"/{name}".endswith(empty)
    ]
    if not bad:
        return
    text = f"evaluation at step {step}: {', '.join(bad)}"
    if cfg.stop_on_nan_metric:
        raise Failure(f"{text} (stop_on_nan_metric). The state is saved; to resume from an earlier one, give --resume")
    warn(text)


def _on_main(strategy: Strategy, compute: Callable[[], Any]) -> Any:
    """Compute metrics on the main process and broadcast them: all ranks decide by them (best model, early stop)."""
    from accelerate.utils import broadcast_object_list

    with _one_thread(torch.device("cpu")):
        return broadcast_object_list([compute() if strategy.accelerator.is_main_process else None])[0]


def _names_on_all_ranks(strategy: Strategy, results: Results) -> tuple[list[str], dict[str, tuple]]:
    """Return (sum names, {per-example name: (shape, dtype)}) of a rank with results; some may have none.

    Raise UsageError on all ranks if micro-batches have different names or widths."""
    from accelerate.utils import gather_object

    columns = {name: (value.shape[1:], value.dtype) for name, value in sorted(results.per_example.items())}
    per_rank = [(results.names, columns, results.seen)]
    if strategy.accelerator.num_processes > 1:
        per_rank = gather_object(per_rank)
    seen = sorted(set().union(*(seen for *_, seen in per_rank)))
    if len(seen) > 1:  # no table could hold their values
        raise UsageError(
            f"the task returns ({', '.join(seen[0])}) for some micro-batches of an evaluation, but ({', '.join(seen[1])}) for "
            "others: return the same names and widths for all rows, with the value 0 where there is nothing to count"
        )
    return max(per_rank, key=lambda of_rank: len(of_rank[0]))[:2]


# ---- modes -----------------------------------------------------------------------------------------------------------


@contextmanager
def _evaluating(module: torch.nn.Module, cfg: RunConfig) -> Iterator[None]:
    """Within, the module is in evaluation mode, and compiled layers run in eager mode, so that eval.py gets the same
    loss and evaluation compiles no graph."""
    training = module.training
    module.eval()
    with torch.compiler.set_stance("force_eager") if cfg.compile else nullcontext():
        yield
    module.train(training)


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Limit the CPU to one thread, because the last bits of a matrix product depend on the number of threads.

    The other cores are then idle. More processes (make eval NPROC=4) use them and give the same result."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
