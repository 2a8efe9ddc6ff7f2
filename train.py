"""Train a model: the whole run, top to bottom. Everything it calls is in src/, one folder per topic. Edit freely.

Usage: accelerate launch train.py --config configs/stdlib_lm.yaml [--learning_rate 1e-3 ...]
"""

import src.config.quick_help  # noqa: F401  prints --help and exits, before the slow imports below
from src.checkpointing.checkpointer import Checkpointer
from src.config import parsing, validation
from src.data import data_loader, dataset
from src.distributed import replica_check, stop_signals, strategies
from src.distributed.init_accelerator import check_environment, init_accelerator, shutdown
from src.reporting.run_logger import RunLogger, print_plan
from src.runtime.exit_codes import run_main
from src.tasks import OPTIONS, Task, make_task
from src.training import auto_batch_size, optimizers, schedules, smoke
from src.training.step import StepTotals, build_model, compute_gradient, optimizer_step
from src.training.technique_chain import TechniqueChain
from src.training.techniques.base import Run
from src.training.train_state import Intervals, TrainState, UpdateResult


def main(argv: list[str]) -> None:
    stop_signals.exit_on_signal()
    cfg, task_options = parsing.parse(parsing.with_default_config(argv), OPTIONS)
    validation.check(cfg, task_options)
    check_environment()
    TechniqueChain(cfg)  # raises UsageError for unknown names and invalid options
    task = make_task(cfg, task_options)
    datasets = dataset.prepare_datasets(cfg, task)  # before the process group exists: cannot time out a collective
    if cfg.dry_run:
        return print_plan(cfg, task, datasets)
    accelerator = init_accelerator(cfg)
    if cfg.smoke:
        smoke.run(train, cfg, task, datasets, accelerator)  # two short passes through `train`, compared
    else:
        train(cfg, task, datasets, accelerator)
    shutdown(accelerator)  # now nothing may refer to the model: torch could deadlock when it frees DDP later


def train(cfg: parsing.RunConfig, task: Task, datasets: dict, accelerator) -> smoke.Snapshot | None:
    train_set, val_set = datasets["train"], datasets.get("validation")
    num_steps = schedules.total_steps(cfg, train_set.stats["examples"])
    lr_at = schedules.make_schedule(cfg, num_steps)  # updates done (steps minus skipped ones) -> learning rate
    techniques = TechniqueChain(cfg)  # SAM, EMA, …: those that the run file asks for
    signals = stop_signals.StopSignals(accelerator, cfg)  # SIGTERM, Ctrl-C, time limit, RUN/save and RUN/stop
    dataset.check_same_data(accelerator, datasets)
    strategy = strategies.make_strategy(accelerator, cfg)  # one process, DDP, FSDP2 or DeepSpeed
    hosts = strategy.hosts  # sums small vectors over all ranks on the CPU (gloo)
    checkpointer = Checkpointer(cfg, strategy, hosts, task, datasets)
    # The model and its loss in one module, with the weights of this run's newest intact checkpoint, if there is one.
    model = build_model(cfg, strategy, task, checkpointer.find_weights(), techniques.change_model)
    optimizer = optimizers.make_optimizer(cfg, model, strategy.can_fuse_optimizer)
    module, optimizer = strategy.prepare(model, optimizer)  # module is the wrapped model: call it, save `model`
    logger = RunLogger(cfg, strategy, hosts, task, train_set, num_steps)  # metrics.jsonl, console, trackers
    run = Run(cfg, strategy, hosts, task, model, module, optimizer, num_steps, TrainState())
    # step, updates, best metric, ...
    state = run.state = checkpointer.load(model, optimizer, logger.meter, **techniques.begin(run))
    due = Intervals(cfg, state, num_steps, has_validation=val_set is not None)  # what is due at this step?
    cfg.per_device_batch_size = auto_batch_size.choose_batch_size(strategy, hosts, cfg, module, task, train_set)
    checkpointer.begin(due, logger.files(), signals)
    logger.begin(datasets, model, lr_at, due, checkpointer.resume_from, checkpointer.notes)

    # A batch is the list of this rank's micro-batches of one step. Its examples depend only on seed, global batch size and
    # step, so a resumed run jumps to its step and needs no sampler state.
    batches = data_loader.train_batches(cfg, strategy, task, train_set, state, num_steps)
    save_requested = False
    module.train()
    signals.begin()  # from here on, a signal saves and stops instead of ending the process at once

    while True:
        # ---- log, evaluate and save if due at this step; a resumed run first repeats what was interrupted here -------
        if due.log():
            logger.train_line(state)
        if due.evaluate():
            with logger.throughput_paused():
                metrics = techniques.evaluate(val_set, signals.stopping)
            if metrics:  # None if a stop request interrupted it: the resumed run evaluates again
                logger.eval_line(state, metrics)
                checkpointer.update_best(metrics)  # an unknown metric_for_best_model ends the run here, after a save
                if due.log():  # early stopping made this step the last one
                    logger.train_line(state)
        if due.save() or save_requested:
            checkpointer.save()  # copies to CPU memory, then writes in a background thread
        if due.finished():
            break

        # ---- one small all-reduce per step: the denominator of the loss, throughput, and requests to save or stop ----
        batch, data_seconds = next(batches)
        totals = StepTotals.sum_over_ranks(hosts, strategy, batch, signals.requests(), checkpointer.failed())
        save_requested = totals.save
        if not totals.examples:  # the stream has no rows left on any rank
            train_set.next_pass()
            continue
        if totals.stop or totals.failed:
            break

        # ---- one step: one optimizer update, unless there are no targets or the gradient is not finite ---------------
        state.step += 1
        losses = None
        if totals.weight:  # 0: no example of the global batch has a target
            batch = strategy.pad_with_dummy_batches(batch, totals.forwards)  # equal forwards if sharded
            # loss = sum of losses / sum of weights over the global batch; gradients are reduced in the last backward only
            losses = techniques.around(compute_gradient)(strategy, module, batch, totals.weight)
            state.finish_update(cfg.max_skipped_steps)  # was the previous update skipped? Late, without a sync
            lr = state.learning_rate = lr_at(state.updates) * state.lr_factor
            techniques.change_gradient()
            state.grad_norm, skipped = optimizer_step(strategy, module, optimizer, lr, cfg.max_grad_norm)
            state.pending = UpdateResult(skipped, state.step, batch, losses)
            techniques.after_update(skipped)
        logger.add_step(state, losses, totals, data_seconds)
        replica_check.check_replicas(strategy, model, state.step, due.replica_check())

    if not due.complete():
        checkpointer.stop(signals.why())  # never returns: saves, then exit code 75; the same command resumes
    state_of_pass = smoke.snapshot(run, checkpointer, techniques, val_set) if cfg.smoke else None
    checkpointer.write_final()  # final/: a folder for from_pretrained
    logger.finish(checkpointer.summary(), checkpointer.sample(), checkpointer.outcome())
    return state_of_pass


if __name__ == "__main__":
    run_main(main)
