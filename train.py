"""Train a model: accelerate launch train.py --config configs/stdlib_lm.yaml [--flag value …]

The table of contents of the project: read it top to bottom in a minute, then edit it. It is yours.
"""

from src import checkpoint, config, launch
from src.batch_size import largest_that_fits
from src.config import RunConfig
from src.data import load_splits
from src.evaluation import evaluate
from src.optim import make_optimizer, make_schedule
from src.plan import steps_per_epoch, training_order
from src.reader import read, windows
from src.step import Objective, Progress, counts, gradient, prepare, update
from src.summary import describe, notes, total_steps
from src.tasks import make_task
from src.tracking import Meter, Tracker, table, topology


def main(argv: list[str]) -> None:
    run, options = config.parse(argv)
    config.check(run, options)
    launch.check_environment()

    # What may take long happens before there is a process group, so that no collective ever waits for it.
    task = make_task(run, options)
    task.load()
    splits = load_splits(run, task)
    if run.dry_run:
        return dry_run(run, task, splits)

    accelerator = launch.start(run)
    train(run, options, task, splits, accelerator)
    launch.finish(accelerator)


def train(run: RunConfig, options, task, splits: dict, accelerator) -> None:
    examples, validation = splits["train"], splits.get("validation")
    total, per_epoch = total_steps(run, len(examples)), steps_per_epoch(len(examples), run.global_batch_size)
    schedule = make_schedule(run, total)  # completed updates -> learning rate
    agree = launch.Agreement(accelerator, run.ddp_timeout)  # adds a small vector over the ranks

    start = checkpoint.agreed(accelerator, run, options)  # None: from the beginning
    objective = Objective(task.build(start), task)
    optimizer = make_optimizer(run, objective, accelerator.mixed_precision == "fp16")
    module, optimizer = prepare(accelerator, objective, optimizer)
    progress = checkpoint.load(start, objective, optimizer, accelerator.scaler) if start else Progress()

    if run.per_device_batch_size == "auto":
        run.per_device_batch_size = largest_that_fits(accelerator, agree, run, module, task, examples)
    resolved = config.to_yaml(run, options)
    checkpoint.set_aside(accelerator, run, start, complete=progress.step >= total)
    tracker = Tracker(accelerator, run, resolved, progress.step, total)
    tracker.say(table(describe(run, splits, objective, schedule, total) | topology(accelerator, run)))
    for note in notes(run, splits, start, progress, total):
        tracker.say(note)

    def due(every: int | None) -> bool:
        return progress.step == total or bool(every and progress.step % every == 0)

    batch, rank, world = run.global_batch_size, accelerator.process_index, accelerator.num_processes
    order = training_order(
        len(examples), batch, run.per_device_batch_size, run.seed, rank, world, progress.step, total, examples.lengths
    )
    batches = read(examples, task, order, run.dataloader_num_workers, pin=accelerator.device.type == "cuda")
    meter, learning_rate, norm = Meter(), None, None
    module.train()
    tracker.begin()
    for window, waited in windows(batches):  # a window: this rank's micro-batches of one optimizer step
        weight, tokens, positions = agree(counts(window)).tolist()
        progress.step += 1
        loss = 0.0
        if weight:  # else no example of the global batch has a target, and every rank skips the update
            learning_rate = schedule(progress.updates)
            loss = gradient(accelerator, module, window, weight)
            norm, changed = update(accelerator, module, optimizer, learning_rate, run.max_grad_norm)
            progress.updates += changed
        meter.add(loss, weight, tokens, positions, waited)
        tracker.step()

        if due(run.logging_steps):
            rest = {"learning_rate": learning_rate, "grad_norm": norm, "skipped": progress.step - progress.updates}
            tracker.line("train", progress.step, {"epoch": progress.step / per_epoch} | meter.line(agree) | rest)
        if validation and due(run.eval_steps):
            with meter.paused():
                tracker.line("eval", progress.step, evaluate(accelerator, agree, module, task, validation, run))
        if due(run.save_steps):
            with meter.paused():
                checkpoint.save(accelerator, run, resolved, objective, optimizer, progress)

    final = checkpoint.export(accelerator, run, objective)
    tracker.end(final, task.sample(objective.model) if accelerator.is_main_process else None)


def dry_run(run: RunConfig, task, splits: dict) -> None:
    """Print the plan and stop."""
    total = total_steps(run, len(splits["train"]))
    print(table(describe(run, splits, task.build(), make_schedule(run, total), total)))
    print(*notes(run, splits, None, Progress(), total), sep="\n")


if __name__ == "__main__":
    launch.main(main)
