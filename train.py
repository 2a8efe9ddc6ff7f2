"""Train a model: accelerate launch train.py --config configs/stdlib_lm.yaml [--flag value …]

The table of contents of the project: read it top to bottom in a minute, then edit it. It is yours.
"""

from src.checkpointing import format, resume
from src.checkpointing.async_writer import CheckpointWriter
from src.checkpointing.hub_upload import push_to_hub
from src.checkpointing.locate_weights import init_weights
from src.config import parsing, validation
from src.config.errors import UsageError
from src.config.schema import RunConfig
from src.data.data_loader import train_batches
from src.data.dataset import check_same_data, prepare_datasets
from src.distributed.host_group import HostGroup
from src.distributed.init_accelerator import check_environment, init_accelerator, shutdown
from src.distributed.stop_signals import StopSignals, exit_on_signal
from src.distributed.strategies import make_strategy
from src.models import compile_and_recompute
from src.reporting.environment import topology
from src.reporting.ledger import Ledger
from src.reporting.metrics import Meter, Tracker
from src.reporting.run_plan import plan_table, run_notes
from src.runtime.console import table
from src.runtime.exit_codes import run_main
from src.tasks import OPTIONS, make_task
from src.training.auto_batch_size import choose_batch_size
from src.training.evaluation import evaluate
from src.training.optimizers import make_optimizer, make_schedule, total_steps
from src.training.replicas import Replicas
from src.training.state import Intervals, TrainState, UpdateResult
from src.training.step import ModelWithLoss, compute_gradient, optimizer_step, window_counts


def main(argv: list[str]) -> None:
    exit_on_signal()
    cfg, options = parsing.parse(parsing.with_default_config(argv), OPTIONS)
    validation.check(cfg, options)
    check_environment()

    # What may take long happens before there is a process group, so that no collective ever waits for it.
    task = make_task(cfg, options)
    splits = prepare_datasets(cfg, task)
    if cfg.dry_run:
        return dry_run(cfg, task, splits)

    accelerator = init_accelerator(cfg)
    train(cfg, options, task, splits, accelerator)
    shutdown(accelerator)


def train(cfg: RunConfig, options, task, splits: dict, accelerator) -> None:
    strategy = make_strategy(accelerator, cfg)  # one process, DDP, FSDP2 or DeepSpeed
    check_same_data(accelerator, splits)
    examples, validation = splits["train"], splits.get("validation")
    total = total_steps(cfg, examples.stats["examples"])
    schedule = make_schedule(cfg, total)  # completed updates -> learning rate
    host_group = HostGroup(accelerator, cfg.ddp_timeout)  # adds a small vector over the ranks
    stop_signals = StopSignals(accelerator, cfg)  # hears signals, the clock, the files `save` and `stop`

    start, remarks = resume.choose_on_all_ranks(accelerator, cfg, options, splits)  # None: from the beginning
    model = strategy.build_model(task, start or init_weights(cfg))
    model_with_loss = ModelWithLoss(compile_and_recompute.compile_and_recompute(model, cfg, accelerator.device), task)
    optimizer = make_optimizer(cfg, model_with_loss, strategy.can_fuse_optimizer)
    module, optimizer = strategy.prepare(model_with_loss, optimizer)
    meter, graphs, parts = (
        Meter(),
        compile_and_recompute.CompileCounter(cfg),
        {"optimizer": optimizer},
    )  # parts: what is saved beside the model
    progress = format.load_checkpoint(start, strategy, model_with_loss, parts, meter) if start else TrainState()
    when = Intervals(cfg, progress, total, evaluates=validation is not None)
    cfg.per_device_batch_size = choose_batch_size(strategy, host_group, cfg, module, task, examples)
    replicas = Replicas(strategy, host_group, cfg, model_with_loss, optimizer, progress, total)

    resolved = parsing.to_yaml(cfg, options)
    tracker, ledger = Tracker(strategy, cfg, total), Ledger(cfg, examples, accelerator.is_main_process)
    about, lines = resume.run_metadata(accelerator, cfg, resolved, splits, start), [tracker.metrics, ledger.lines]
    saver = CheckpointWriter(strategy, host_group, cfg, model_with_loss, parts, about, stop_signals, lines, start)
    tracker.say(table(plan_table(cfg, splits, model_with_loss, schedule, total) | topology(strategy, cfg)))
    for note in remarks + run_notes(cfg, splits, start, progress, when.complete()):
        tracker.say(note)
    if not when.complete():
        resume.archive_stale_outputs(accelerator, cfg, start, about["lineage"])
        tracker.begin(resolved, progress)
        ledger.begin(progress.step)

    learning_rate = norm = None
    batch, rank, world = cfg.global_batch_size, strategy.data_rank, strategy.data_world_size

    def log() -> None:
        """Write a train line about the steps since the last one."""
        progress.finish_update(cfg.max_skipped_steps)
        rest = {"learning_rate": learning_rate, "grad_norm": norm, "skipped": progress.step - progress.updates}
        line = {"epoch": examples.epoch_at(progress.step, batch)} | meter.line(host_group) | rest | graphs.line()
        tracker.line("train", progress.step, line)

    def score() -> None:
        """Evaluate, unless a stop is asked for meanwhile."""
        with meter.paused():
            if line := evaluate(strategy, host_group, module, task, validation, cfg, stop_signals.stopping):
                tracker.line("eval", progress.step, line)
                try:
                    progress.update_best(line, cfg)
                except UsageError as error:  # only now is it known which metrics there are
                    saver.leave(host_group, save, error)
        if when.finished() and meter.weight:  # an early end, between two train lines
            log()

    def save() -> None:
        """Copy the state to the host, to be written while training goes on."""
        with meter.paused():
            progress.finish_update(cfg.max_skipped_steps)
            replicas.before_save()
            if cfg.streaming:
                progress.stream = examples.position(progress.step, host_group)
            if when.finished() or when.best():
                saver.catch_up(host_group)  # or this save could be skipped while the disk still writes the one before
            saver.save(progress, meter.state(host_group), host_group)

    module.train()
    stop_signals.begin()
    if progress.step and when.evaluation_due():  # a stop came in the middle of it
        score()
        if when.saved():
            save()
    last = progress.step if when.finished() else total
    pin = accelerator.device.type == "cuda"
    batches = train_batches(cfg, task, examples, progress, last, rank, world, pin)
    for window, waited in batches:  # a window: this rank's micro-batches of one optimizer step
        sums = host_group.sum(
            [
                *window_counts(window),
                *stop_signals.requests(),
                saver.failed(),
                *strategy.forwards_per_rank(window),
            ]
        )
        weight, tokens, positions, rows, low, high, wanted, stop, failed, *turns = sums.tolist()
        if stop or failed or when.finished():
            break
        if not rows:  # no rank has any left of this pass through a stream
            examples.next_pass()
            continue
        progress.step += 1
        losses = None
        if weight:  # else no example of the global batch has a target, and every rank skips the update
            window = strategy.pad_with_dummy_batches(window, turns)
            losses = compute_gradient(strategy, module, window, weight)
            progress.finish_update(cfg.max_skipped_steps)  # the update before this one: the device has an answer by now
            learning_rate = schedule(progress.updates)
            norm, skipped = optimizer_step(strategy, module, optimizer, learning_rate, cfg.max_grad_norm)
            progress.pending = UpdateResult(skipped, progress.step, window, losses)
        meter.add(losses, weight, tokens, positions, waited)
        ledger.add(progress.step, rows, low, high)
        tracker.step()

        replicas.after_step()
        if when.due(cfg.logging_steps):
            log()
        if when.evaluation_due():
            score()
        if wanted or when.saved():
            save()
        if when.finished():
            break

    if not when.complete():  # asked to stop, or the disk does not take checkpoints any more
        saver.leave(host_group, save, stop_signals.why())
    saver.export(progress, host_group)
    saver.finish(host_group)
    tracker.say(saver.report(when))
    if when.complete() and cfg.push_to_hub:
        tracker.say(push_to_hub(cfg, accelerator.is_main_process))
    tracker.end(saver.sample(task), when.outcome() | {"final_step": saver.final})


def dry_run(cfg: RunConfig, task, splits: dict) -> None:
    """Print the plan and stop."""
    total = total_steps(cfg, splits["train"].stats["examples"])
    print(table(plan_table(cfg, splits, task.build(), make_schedule(cfg, total), total)))
    print(*run_notes(cfg, splits, None, TrainState(), False), sep="\n")


if __name__ == "__main__":
    run_main(main)
