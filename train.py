"""Train a model: accelerate launch train.py --config configs/stdlib_lm.yaml [--flag value …]

The table of contents of the project: read it top to bottom in a minute, then edit it. It is yours.
"""

from src.checkpointing import format, resume
from src.checkpointing.async_writer import Saver
from src.checkpointing.hub_upload import push
from src.checkpointing.locate_weights import begin_with
from src.config import parsing, validation
from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.data.batch_plan import training_order
from src.data.data_loader import read, windows
from src.data.dataset import load, same_everywhere
from src.distributed import launch, prepare_model, replica_check, strategies
from src.distributed.stop_signals import Watch, before_training
from src.distributed.tensor_parallel import place
from src.models import compile_and_recompute
from src.reporting.environment import topology
from src.reporting.ledger import Ledger
from src.reporting.metrics import Meter, Tracker
from src.reporting.run_plan import describe, notes
from src.runtime.console import table
from src.tasks import OPTIONS, make_task
from src.training import local_sgd
from src.training.auto_batch_size import largest_that_fits
from src.training.evaluation import evaluate
from src.training.optimizers import make_optimizer, make_schedule, total_steps
from src.training.state import Outcome, Progress, Rhythm
from src.training.step import Objective, counts, gradient, update


def main(argv: list[str]) -> None:
    before_training()
    run, options = parsing.parse(parsing.or_sample(argv), OPTIONS)
    validation.check(run, options)
    launch.check_environment()

    # What may take long happens before there is a process group, so that no collective ever waits for it.
    task = make_task(run, options)
    splits = load(run, task)
    if run.dry_run:
        return dry_run(run, task, splits)

    accelerator = launch.start(run)
    train(run, options, task, splits, accelerator)
    launch.finish(accelerator)


def train(run: RunConfig, options, task, splits: dict, accelerator) -> None:
    same_everywhere(accelerator, splits)
    examples, validation = splits["train"], splits.get("validation")
    total = total_steps(run, examples.facts["examples"])
    schedule = make_schedule(run, total)  # completed updates -> learning rate
    agree = launch.Agreement(accelerator, run.ddp_timeout)  # adds a small vector over the ranks
    outside = Watch(accelerator, run)  # hears signals, the clock, the files `save` and `stop`

    start, remarks = resume.agreed(accelerator, run, options, splits)  # None: from the beginning
    model = prepare_model.build(accelerator, task, start or begin_with(run))
    objective = Objective(compile_and_recompute.tuned(model, run, accelerator.device), task)
    optimizer = make_optimizer(run, objective, strategies.fuses(accelerator, run))
    module, optimizer = prepare_model.prepare(accelerator, objective, optimizer)
    meter, graphs, parts = (
        Meter(),
        compile_and_recompute.Graphs(run),
        {"optimizer": optimizer},
    )  # parts: what is saved beside the model
    progress = format.load(start, objective, parts, accelerator.scaler, meter) if start else Progress()
    when = Rhythm(run, progress, total, evaluates=validation is not None)
    if run.per_device_batch_size == "auto":
        run.per_device_batch_size = largest_that_fits(accelerator, agree, run, module, task, examples)
    # average() makes the ranks one again where they update alone, by local_sgd_steps
    module, average = local_sgd.begin(accelerator, agree, run, module, optimizer, progress)

    resolved = parsing.to_yaml(run, options)
    tracker, ledger = Tracker(accelerator, run, total), Ledger(run, examples, accelerator.is_main_process)
    about, lines = resume.about(accelerator, run, resolved, splits, start), [tracker.metrics, ledger.lines]
    saver = Saver(accelerator, agree, run, objective, parts, about, outside, lines, start)
    tracker.say(table(describe(run, splits, objective, schedule, total) | topology(accelerator, run)))
    for note in remarks + notes(run, splits, start, progress, when.complete()):
        tracker.say(note)
    if not when.complete():
        resume.set_aside(accelerator, run, start, about["lineage"])
        tracker.begin(resolved, progress)
        ledger.begin(progress.step)

    learning_rate = norm = None
    batch, (rank, world) = run.global_batch_size, place(accelerator)

    def log() -> None:
        """Write a train line about the steps since the last one."""
        progress.settle(run.max_skipped_steps)
        rest = {"learning_rate": learning_rate, "grad_norm": norm, "skipped": progress.step - progress.updates}
        line = {"epoch": examples.epoch_at(progress.step, batch)} | meter.line(agree) | rest | graphs.line()
        tracker.line("train", progress.step, line)

    def score() -> None:
        """Evaluate, unless a stop is asked for meanwhile."""
        with meter.paused():
            if line := evaluate(accelerator, agree, module, task, validation, run, outside.stopping):
                tracker.line("eval", progress.step, line)
                try:
                    progress.judge(line, run)
                except UsageError as error:  # only now is it known which metrics there are
                    saver.leave(agree, save, error)
        if when.over() and meter.weight:  # an early end, between two train lines
            log()

    def save() -> None:
        """Copy the state to the host, to be written while training goes on."""
        with meter.paused():
            progress.settle(run.max_skipped_steps)
            average()
            replica_check.check(accelerator, agree, objective, progress.step)
            if run.streaming:
                progress.stream = examples.position(progress.step, agree)
            if when.over() or when.best():
                saver.catch_up(agree)  # or this save could be skipped while the disk still writes the one before
            saver.save(progress, meter.state(agree), agree)

    module.train()
    outside.begin()
    if progress.step and when.unevaluated():  # a stop came in the middle of it
        score()
        if when.saved():
            save()
    first, last = progress.step, progress.step if when.over() else total
    pin, each = accelerator.device.type == "cuda", strategies.syncs_each(accelerator, run)
    if run.streaming:
        coming = examples.windows(rank, world, progress, pin)
    else:
        cut = {"tokens": run.per_device_batch_tokens, "quotas": examples.quotas}
        order = training_order(
            len(examples), batch, run.per_device_batch_size, run.seed, rank, world, first, last, examples.lengths, **cut
        )
        coming = windows(read(examples, task, order, run, pin))
    for window, waited in coming:  # a window: this rank's micro-batches of one optimizer step
        sums = agree([*counts(window), *outside.requests(), saver.failed(), *strategies.turns(accelerator, window)])
        weight, tokens, positions, rows, low, high, wanted, stop, failed, *turns = sums.tolist()
        if stop or failed or when.over():
            break
        if not rows:  # no rank has any left of this pass through a stream
            examples.turn()
            continue
        progress.step += 1
        losses = None
        if weight:  # else no example of the global batch has a target, and every rank skips the update
            window = strategies.even(window, turns)
            losses = gradient(accelerator, module, window, weight, each)
            progress.settle(run.max_skipped_steps)  # the update before this one: the device has an answer by now
            learning_rate = schedule(progress.updates)
            norm, left_out = update(accelerator, module, optimizer, learning_rate, run.max_grad_norm)
            progress.pending = Outcome(left_out, progress.step, window, losses)
        meter.add(losses, weight, tokens, positions, waited)
        ledger.add(progress.step, rows, low, high)
        tracker.step()

        if when.due(run.local_sgd_steps):
            average()
        if when.due(run.logging_steps):
            log()
        if when.unevaluated():
            score()
        if run.drift_check_steps and when.due(run.drift_check_steps):
            replica_check.check(accelerator, agree, objective, progress.step)
        if wanted or when.saved():
            save()
        if when.over():
            break

    if not when.complete():  # asked to stop, or the disk does not take checkpoints any more
        saver.leave(agree, save, outside.why())
    saver.export(progress, agree)
    saver.finish(agree)
    tracker.say(saver.report(when))
    if when.complete() and run.push_to_hub:
        tracker.say(push(run, accelerator.is_main_process))
    tracker.end(saver.sample(task), when.outcome() | {"final_step": saver.final})


def dry_run(run: RunConfig, task, splits: dict) -> None:
    """Print the plan and stop."""
    total = total_steps(run, splits["train"].facts["examples"])
    print(table(describe(run, splits, task.build(), make_schedule(run, total), total)))
    print(*notes(run, splits, None, Progress(), False), sep="\n")


if __name__ == "__main__":
    launch.main(main)
