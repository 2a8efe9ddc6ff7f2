"""Train a model: accelerate launch train.py --config configs/stdlib_lm.yaml [--learning_rate 1e-3 ...]

The whole run, top to bottom. Everything it calls is in src/, one folder per topic (docs/architecture.md). Edit freely.
"""

from src.checkpointing.checkpointer import Checkpointer
from src.config import parsing, validation
from src.data import data_loader, dataset
from src.distributed import host_group, stop_signals, strategies
from src.distributed.init_accelerator import check_environment, init_accelerator, shutdown
from src.reporting.run_logger import RunLogger, print_plan
from src.runtime.exit_codes import run_main
from src.tasks import OPTIONS, Task, make_task
from src.training import auto_batch_size, optimizers, replicas, schedules
from src.training.evaluation import evaluate
from src.training.step import StepTotals, build_model, compute_gradient, optimizer_step
from src.training.train_state import Intervals, UpdateResult


def main(argv: list[str]) -> None:
    stop_signals.exit_on_signal()
    cfg, options = parsing.parse(parsing.with_default_config(argv), OPTIONS)
    validation.check(cfg, options)
    check_environment()
    task = make_task(cfg, options)
    datasets = dataset.prepare_datasets(cfg, task)  # before there is a process group: no collective can time out on it
    if cfg.dry_run:
        return print_plan(cfg, task, datasets)
    accelerator = init_accelerator(cfg)
    train(cfg, task, datasets, accelerator)
    shutdown(accelerator)


def train(cfg: parsing.RunConfig, task: Task, datasets: dict, accelerator) -> None:
    train_set, val_set = datasets["train"], datasets.get("validation")
    num_steps = schedules.total_steps(cfg, train_set.stats["examples"])
    lr_at = schedules.make_schedule(cfg, num_steps)  # completed updates -> learning rate
    hosts = host_group.HostGroup(accelerator, cfg.ddp_timeout)  # sums small vectors over all ranks on the CPU
    signals = stop_signals.StopSignals(accelerator, cfg)  # SIGTERM, Ctrl-C, the time limit, the files `save` and `stop`
    dataset.check_same_data(accelerator, datasets)
    strategy = strategies.make_strategy(accelerator, cfg)  # one process, DDP, FSDP2 or DeepSpeed
    checkpointer = Checkpointer(cfg, strategy, hosts, task, datasets)
    # The task's model and loss in one module; with the weights of the newest intact checkpoint of this run, if there is one.
    model = build_model(cfg, strategy, task, weights=checkpointer.find())
    optimizer = optimizers.make_optimizer(cfg, model, strategy.can_fuse_optimizer)
    module, optimizer = strategy.prepare(model, optimizer)
    logger = RunLogger(cfg, strategy, hosts, task, train_set, num_steps)  # metrics.jsonl, console, trackers
    state = checkpointer.load(model, optimizer, logger.meter)  # step, updates, best metric, ...
    due = Intervals(cfg, state, num_steps, has_validation=val_set is not None)
    cfg.per_device_batch_size = auto_batch_size.choose_batch_size(strategy, hosts, cfg, module, task, train_set)
    model_replicas = replicas.Replicas(strategy, hosts, cfg, model, optimizer, state, num_steps)
    checkpointer.begin(due, logger.files(), model_replicas, signals)
    logger.begin(datasets, model, lr_at, due, checkpointer.resume_from, checkpointer.notes)

    # A batch is this rank's micro-batches of one optimizer step. Which examples are in it depends on seed and step only,
    # so entering at any step is O(1) and resuming needs no sampler state.
    batches = data_loader.train_batches(cfg, strategy, task, train_set, state, num_steps)
    lr = grad_norm = save_requested = None
    module.train()
    signals.begin()

    while True:
        # ---- what is due at this step; after a resume, this first finishes what was interrupted ----------------------
        if due.log():
            logger.train_line(state, lr, grad_norm)
        if due.evaluate():
            with logger.paused():
                metrics = evaluate(strategy, hosts, module, task, val_set, cfg, signals.stopping)
            if metrics:  # None: a stop was requested in the middle; the evaluation is repeated after the resume
                logger.eval_line(state, metrics)
                checkpointer.update_best(metrics)  # ends the run, saved, if metric_for_best_model is none of them
                if due.log():  # early stopping made this step the last one
                    logger.train_line(state, lr, grad_norm)
        if due.save() or save_requested:
            checkpointer.save()  # copies to the host, then writes in a thread while training continues
        if due.finished():
            break

        # ---- one all-reduce of a few numbers per step: the normalizer, throughput, and every shared decision ----------
        batch, data_seconds = next(batches)
        totals = StepTotals.sum_over_ranks(hosts, strategy, batch, signals.requests(), checkpointer.failed())
        save_requested = totals.save
        if totals.stop or totals.failed:
            break
        if not totals.examples:  # a stream is exhausted on every rank
            train_set.next_pass()
            continue

        # ---- one optimizer step ----------------------------------------------------------------------------------------
        state.step += 1
        losses = None
        if totals.weight:  # 0: no example of the global batch has a target, and all ranks skip the update alike
            batch = strategy.pad_with_dummy_batches(batch, totals.forwards)
            # sum of losses / sum of weights over the global batch; gradients are reduced after the last micro-batch only
            losses = compute_gradient(strategy, module, batch, totals.weight)
            state.finish_update(cfg.max_skipped_steps)  # of the previous step: the device has its result by now
            lr = lr_at(state.updates)
            grad_norm, skipped = optimizer_step(strategy, module, optimizer, lr, cfg.max_grad_norm)
            state.pending = UpdateResult(skipped, state.step, batch, losses)
        logger.add_step(state.step, losses, totals, data_seconds)
        model_replicas.after_step()  # local SGD and the check that replicas are equal, when due

    if not due.complete():
        checkpointer.stop(signals.why())  # saves and ends with exit code 75; the same command resumes
    checkpointer.write_final()
    logger.finish(checkpointer.summary(), checkpointer.sample(), checkpointer.outcome())


if __name__ == "__main__":
    run_main(main)
