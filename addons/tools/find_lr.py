"""Suggest a learning rate for a run file: accelerate launch find_lr.py --config configs/stdlib_lm.yaml

A range test: the run's first steps with a growing learning rate. It writes nothing but --curve FILE.
"""

import json
import math
from pathlib import Path

from src.checkpointing.locate_weights import init_weights
from src.config import parsing, validation
from src.config.errors import UsageError
from src.config.fields import declared_options
from src.data import data_loader, dataset
from src.distributed import strategies
from src.distributed.init_accelerator import check_environment, init_accelerator, shutdown
from src.reporting.environment import topology
from src.runtime import console
from src.runtime.exit_codes import run_main
from src.storage import atomic_folder
from src.storage.jsonl import strict_json
from src.tasks import OPTIONS, Task, make_task
from src.training import auto_batch_size, optimizers, schedules
from src.training.lr_range_test import RangeTest, Result, has_diverged, result
from src.training.step import StepTotals, build_model, compute_gradient, optimizer_step
from src.training.technique_chain import TechniqueChain
from src.training.techniques.base import Run
from src.training.train_state import TrainState, UpdateResult


def main(argv: list[str]) -> None:
    test, argv = parsing.own_flags(RangeTest, parsing.with_default_config(argv))
    also = {name: rules.help for name, rules in declared_options(RangeTest).items()}
    cfg, task_options = parsing.parse(argv, OPTIONS, also=also)
    validation.check(cfg, task_options)
    for name in ("dry_run", "smoke"):
        if getattr(cfg, name):
            raise UsageError(f"{name}: find_lr.py has no {name}: give --{name} to train.py")
    check_environment()
    cfg.report_to = []  # no tracker
    TechniqueChain(cfg)
    task = make_task(cfg, task_options)
    datasets = dataset.prepare_datasets(cfg, task, wanted=("train",))
    accelerator = init_accelerator(cfg)
    find(test, cfg, task, datasets, accelerator)
    shutdown(accelerator)  # now nothing may refer to the model


def find(test: RangeTest, cfg: parsing.RunConfig, task: Task, datasets: dict, accelerator) -> None:
    """Run the test on all ranks, and print its result on one."""
    dataset.check_same_data(accelerator, datasets)
    strategy = strategies.make_strategy(accelerator, cfg)
    found = run_test(test, cfg, task, datasets["train"], strategy)
    if accelerator.is_main_process:
        report(test, cfg, strategy, found)


def run_test(test: RangeTest, cfg: parsing.RunConfig, task: Task, train_set, strategy: strategies.Strategy) -> Result:
    """Train as train.py does from step 1, but with the rates of `test`, until the loss diverges."""
    techniques, hosts, state = TechniqueChain(cfg), strategy.hosts, TrainState()
    model = build_model(cfg, strategy, task, init_weights(cfg), techniques.change_model)
    optimizer = optimizers.make_optimizer(cfg, model, strategy.can_fuse_optimizer)
    module, optimizer = strategy.prepare(model, optimizer)
    num_steps = schedules.total_steps(cfg, train_set.stats["examples"])
    techniques.begin(Run(cfg, strategy, hosts, task, model, module, optimizer, num_steps, state))
    cfg.per_device_batch_size = auto_batch_size.choose_batch_size(strategy, hosts, cfg, module, task, train_set)
    batches = data_loader.train_batches(cfg, strategy, task, train_set, state, test.updates)
    bar = console.bar("range test", test.updates, "update", shown=strategy.accelerator.is_main_process)
    rates, losses = [], []
    module.train()
    while state.step < test.updates and not (losses and has_diverged(losses)):
        batch, _ = next(batches)
        totals = StepTotals.sum_over_ranks(hosts, strategy, batch, [0.0, 0.0], 0.0)
        if not totals.examples:  # the stream has no rows left on any rank
            train_set.next_pass()
            continue
        rate = test.rate(state.step)
        state.step += 1
        bar.update()
        if not totals.weight:
            continue
        batch = strategy.pad_with_dummy_batches(batch, totals.forwards)
        step_losses = techniques.around(compute_gradient)(strategy, module, batch, totals.weight)
        state.finish_update(test.updates + 1)  # skipped updates are not an error here
        state.learning_rate = rate
        techniques.change_gradient()
        state.grad_norm, skipped = optimizer_step(strategy, module, optimizer, rate, cfg.max_grad_norm)
        state.pending = UpdateResult(skipped, state.step, batch, step_losses)
        techniques.after_update(skipped)
        # This waits for the device in every step: ranks must stop together, and before the weights are far off.
        losses.append(hosts.sum([float(step_losses.losses.sum())])[0].item() / totals.weight)
        rates.append(rate)
    bar.close()
    if not losses:
        raise UsageError(f"no target in the first {test.updates} global batches of the training data")
    return result(test, rates, losses)


def report(test: RangeTest, cfg: parsing.RunConfig, strategy: strategies.Strategy, found: Result) -> None:
    """Print the curve and the suggestion; with --curve FILE, draw it and write its numbers."""
    print(console.table(topology(strategy, cfg)) + "\n\n  learning rate   smoothed loss")
    low, high = min(found.smooth), max(found.smooth[0], min(found.smooth))
    for i in range(0, len(found.smooth), max(1, len(found.smooth) // 20)):
        share = (found.smooth[i] - low) / (high - low) if high > low else 0.0
        print(f"        {found.rates[i]:.1e}  {found.smooth[i]:>14,.4f}  {'#' * round(40 * min(1.0, share))}")
    if found.suggestion is None:
        print(f"\nno suggestion: {found.reason}")
    else:
        print(f"\nsuggestion: --learning_rate {found.suggestion:g} ({found.reason})")
    print(f"The run file has learning_rate {cfg.learning_rate:g}. Nothing was saved.")
    if test.curve:
        numbers = {"suggestion": found.suggestion, "reason": found.reason, "learning_rate": found.rates}
        numbers |= {"loss": found.losses, "smoothed_loss": found.smooth}
        file = Path(test.curve)
        atomic_folder.rewrite(file.with_suffix(".json"), json.dumps(strict_json(numbers)) + "\n")
        draw(file, found)
        print(f"curve: {file.resolve()}, numbers: {file.with_suffix('.json').resolve()}")


def draw(file: Path, found: Result) -> None:
    """Write losses against rates to an image file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(found.rates[: len(found.losses)], found.losses, alpha=0.3, label="loss of a global batch")
    axes.plot(found.rates[: len(found.smooth)], found.smooth, label="smoothed")
    if found.suggestion is not None:
        axes.axvline(found.suggestion, linestyle=":", color="gray", label=f"suggestion {found.suggestion:g}")
    margin = 0.2 * (max(found.smooth[0], min(found.smooth)) - min(found.smooth) or 1.0)
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
    if math.isfinite(margin):  # not if the first loss is not
        axes.set_ylim(min(found.smooth) - margin, max(found.smooth[0], min(found.smooth)) + 3 * margin)
    axes.legend(frameon=False)
    figure.savefig(file)


if __name__ == "__main__":
    run_main(main)
