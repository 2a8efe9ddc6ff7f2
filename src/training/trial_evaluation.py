"""Trial evaluation before step 1: does an evaluation have the metric that metric_for_best_model names?

Tests: tests/training/test_trial_evaluation.py.
"""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from src.config.best_metric import best_by, missing_metric
from src.config.errors import warn
from src.config.schema import RunConfig
from src.data.data_loader import collate, seed_everything
from src.distributed.strategies import Strategy
from src.training.evaluation import eval_line, eval_mode, evaluate, is_size, on_main, uncompiled
from src.training.evaluation_plan import Plan, make_plan
from src.training.evaluation_results import Results
from src.training.step import ModelWithLoss
from src.training.technique_chain import TechniqueChain
from src.training.trial_loss import LIMIT

ROWS = (2, 100)  # of each source; the second number only if an evaluation of the first rows lacks the metric


def check_best_metric(
    cfg: RunConfig, split: Any, model: ModelWithLoss, strategy: Strategy | None = None, has_weights: bool = True
) -> None:
    """Raise UsageError on all ranks if an evaluation of `split` lacks metric_for_best_model.

    A collective; costs nothing if the metric is a loss, two rows if they have it, and a whole evaluation if the first
    rows lack it. Buffers and the random state stay as they are. Without `strategy` (a dry run), this process does it
    alone on the CPU with the first rows, and only warns where these do not tell."""
    wanted, _ = best_by(cfg)
    averages = TechniqueChain(cfg).averages
    if split is None:
        return
    losses = ["loss", *(f"{source}/loss" for source, *_ in split.segments())]
    if wanted in _with_averages(losses, averages):
        return
    names, why_not = [], ""
    longest = max(min(len(part), cfg.max_eval_examples or len(part)) for *_, part in split.segments())
    for rows in ROWS:
        tokens = sum(int(np.sum(part.lengths[:rows])) for *_, part in split.segments())
        too_large = not has_weights or sum(p.numel() for p in model.parameters()) * tokens > LIMIT
        if strategy is None and too_large:
            why_not = "the model is too large for a few rows on this CPU"
            break
        names, why_not = _names(replace(cfg, max_eval_examples=min(rows, longest)), split, model, strategy)
        names = _with_averages(names, averages)
        if wanted in names:
            return
    if not why_not and longest > ROWS[-1]:
        why_not = f"the first {ROWS[-1]} rows have {', '.join(names)}"
        if strategy:
            warn(f"metric_for_best_model: {why_not}, but no {wanted}: evaluating all rows to look for it")
            names, why_not = _with_averages(_names_of_all(cfg, split, model, strategy), averages), ""
    if not why_not and wanted not in names:
        raise missing_metric(wanted, names)
    if why_not:
        warn(f"metric_for_best_model {wanted} is not checked before the first evaluation: {why_not}")


def _with_averages(names: list[str], averages: list[str]) -> list[str]:
    return [*names, *(f"{average}/{name}" for average in averages for name in names if not is_size(name))]


def _names(cfg: RunConfig, split: Any, model: ModelWithLoss, strategy: Strategy | None) -> tuple[list[str], str]:
    """Return the names in the eval line of the first rows, and the reason if these rows cannot tell all of them."""
    plan = make_plan(split, cfg, model.task)
    if strategy is None:
        results = _evaluate(cfg, plan, split, model, torch.device("cpu"))
    else:
        with strategy.buffers.unchanged(), random_state_kept(strategy.accelerator.device):
            results = _evaluate(cfg, plan, split, model, strategy.accelerator.device)
        strategy.reshard(model)

    names, table, values = results.values()

    def found() -> tuple[list[str], str]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of metrics of two rows
                line = eval_line(model.task, plan, names, table, values, lambda compute: compute())
        except Exception as error:  # perhaps only because the rows are few
            return [], f"the metrics of the first {plan.examples} rows fail with {type(error).__name__}: {error}"
        empty = [name for name, value in line.items() if name.rpartition("/")[2] == "weight" and not value]
        return list(line), f"the first {plan.examples} rows have no targets" if empty else ""

    return found() if strategy is None else on_main(strategy, found)


def _names_of_all(cfg: RunConfig, split: Any, model: ModelWithLoss, strategy: Strategy) -> list[str]:
    """Return the names in the eval line of all rows: some tasks name a metric only if its class occurs."""
    with strategy.buffers.unchanged(), random_state_kept(strategy.accelerator.device):
        line = evaluate(strategy, strategy.hosts, model, model.task, split, cfg)
    strategy.reshard(model)
    return list(line or {})


@torch.no_grad()
def _evaluate(cfg: RunConfig, plan: Plan, split: Any, model: ModelWithLoss, device: torch.device) -> Results:
    """Return the results of the whole plan. All ranks compute the same, so a sharded model runs equally many passes."""
    results = Results(plan)
    with eval_mode(model), uncompiled(cfg):
        for micro in plan.micro_batches:
            _, batch = collate(model.task, micro, split.rows(micro.ids), training=False)
            seed_everything(micro.seed)
            results.add(micro, batch, model({name: value.to(device) for name, value in batch.inputs.items()}))
        results.flush()
    return results


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Within, anything may be drawn at random; afterwards, all generators are as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        yield
    random.setstate(python)
    np.random.set_state(numpy)
