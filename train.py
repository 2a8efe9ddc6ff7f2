"""Train a model: the whole run, top to bottom. What it calls is in src/, which is yours like this file, and in engine/.

Usage: accelerate launch train.py --config configs/stdlib_lm.yaml [--learning_rate 1e-3 ...]
"""

from engine import startup

if __name__ == "__main__":
    # Before the slow imports: checks the installation, answers --help and --schema, ends at Ctrl-C.
    startup.begin(is_training=True)

# isort: split
from functools import partial

import torch

from engine.checkpointing import checkpointer, resume, run_identity
from engine.config import parsing, validation
from engine.distributed import choose_backend, replica_check, stop_signals
from engine.distributed.init_accelerator import check_environment, init_accelerator, shutdown
from engine.find_tasks import OPTIONS, make_task
from engine.plan import data_loader, dataset, seeding
from engine.plan.data_loader import StepBatch
from engine.process.exit_codes import run_main
from engine.run.answers import answer_samples
from engine.run.techniques import make_techniques
from engine.run.totals_and_votes import StepLosses, StepTotals
from engine.run.train_state import Intervals, Run
from engine.task import Task
from src.fields import RunConfig
from src.training import evaluation, optimizers, schedules, training_model
from src.training.run_logger import RunLogger
from src.training.run_plan import print_plan


def main(argv: list[str]) -> None:
    stop_signals.exit_on_signal()
    argv = parsing.with_default_config(argv)
    cfg, task_options = parsing.parse(argv, OPTIONS)
    # The run folder: a new one for another configuration, unless a flag or the run file names it.
    cfg = run_identity.choose_folder(argv, cfg, task_options, schedules.has_same_rates)
    validation.check(cfg, task_options)
    check_environment()
    task = make_task(cfg, task_options)
    datasets = dataset.prepare_datasets(cfg, task)  # before the process group exists: cannot time out a collective
    if cfg.dry_run:
        return print_plan(cfg, task, datasets)
    accelerator = init_accelerator(cfg)
    train(cfg, task, datasets, accelerator)
    shutdown(accelerator)  # now nothing may refer to the model: torch could deadlock when it frees DDP later


def train(cfg: RunConfig, task: Task, datasets: dict, accelerator, make_checkpoints=checkpointer.Checkpointer) -> None:
    train_set, val_set = datasets["train"], datasets.get("validation")
    num_steps = schedules.total_steps(cfg, train_set.stats["examples"])
    lr_at = schedules.make_schedule(cfg, num_steps)  # updates done (steps minus skipped ones) -> learning rate
    dataset.check_same_data(datasets)
    backend = choose_backend.make_backend(accelerator, cfg)  # one process, DDP or FSDP2; add-ons bring others
    techniques = make_techniques(cfg)  # SAM, EMA, …: those that the run file names, mostly none

    # ---- model and optimizer, with the state of this run's newest intact checkpoint, if there is one -----------------
    start = resume.find_start(cfg, backend, task, datasets, schedules.has_same_rates)
    model = training_model.build_model(cfg, backend, task, train_set, start.weights, techniques.change_model)
    optimizer = optimizers.make_optimizer(cfg, model, backend.can_fuse_optimizer)
    module, optimizer = backend.prepare(model, optimizer)  # accelerator.prepare: call `module`, save `model`
    run = Run(cfg, backend, task, datasets, model, module, optimizer, num_steps)
    parts = {"optimizer": optimizer} | techniques.begin(run)  # what checkpoints hold beside the model
    state = run.state = start.load(run, parts)  # step, updates, best metric, ...
    due = Intervals(cfg, state, num_steps, has_validation=val_set is not None)  # what is due at this step?
    # From here on a signal, Ctrl-C, the time limit or RUN/stop saves and stops. Before, a signal ends its process at once:
    run.hosts.sum([0.0])  # a barrier, so that no rank listens while another one still loads
    signals = stop_signals.StopSignals(accelerator.process_index, cfg)
    signals.listen()
    checkpoints = make_checkpoints(run, start, due, techniques, parts, signals)
    checkpoints.begin()  # renames old outputs that do not fit this run
    logger = RunLogger(run, due)  # metrics.jsonl, console, trackers
    logger.begin(start, techniques, lr_at)  # prints the plan; later lines than the checkpoint are removed

    # A batch is the list of this rank's micro-batches of one step. Its examples depend only on seed, global batch size and
    # step, so a resumed run jumps to its step and needs no sampler state.
    batches = data_loader.train_batches(cfg, backend, task, train_set, state, num_steps)
    gradient = task.wrap_gradient(compute_gradient)  # the same function, unless the loss is one over the whole batch
    gradient = backend.wrap_gradient(gradient)  # running statistics; dummy batches; on 3 DDP ranks the first one twice
    gradient = techniques.wrap_gradient(gradient)  # SAM computes it at two places, …
    evaluate = partial(evaluation.evaluate, backend, module, task, val_set, cfg, signals)
    answer = partial(answer_samples, backend, module, task, cfg, signals)
    module.train()

    while True:
        # ---- log, evaluate and save if due at this step; a resumed run first repeats what was interrupted here -------
        if due.log():
            logger.train_line()
        if due.evaluate():
            with run.meter.paused():
                metrics = techniques.evaluate(evaluate(), evaluate)  # None if a stop request interrupted it
                samples = answer() if metrics else None  # answers to `sample_prompts`; None likewise
            if metrics and samples is not None:
                logger.eval_line(metrics)
                logger.sample_lines(samples)
                checkpoints.update_best(metrics)  # an unknown metric_for_best_model ends the run here, after a save
                if due.log():  # early stopping made this step the last one
                    logger.train_line()
        if due.save():
            checkpoints.save()  # copies to CPU memory, then writes in a background thread
        if due.finished():  # all steps are done, or early_stopping_patience is used up
            break

        # ---- one small all-reduce per step: the denominator of the loss, throughput, and requests to save or stop ----
        batch, data_seconds = next(batches)
        signals.look(state.step)  # at the clock, the launcher, and the files `stop` and `save`
        votes = signals.votes() | {"failed": checkpoints.failed()}  # add your own: 1.0 is a vote for it
        totals = StepTotals.sum_over_ranks(backend, batch, votes)
        if totals.save:
            checkpoints.save()
        if totals.stop or totals.failed:
            break

        # ---- one step: one optimizer update, unless there are no targets or the gradient is not finite ---------------
        state.step += 1
        losses = None
        if totals.weight:  # 0: no example of the global batch has a target
            losses = gradient(backend, module, batch, totals)  # compute_gradient below, wrapped as above
            state.finish_update(cfg.max_skipped_steps)  # was the previous update skipped? Late, without a sync
            lr = state.learning_rate = lr_at(state.updates) * state.lr_factor
            techniques.change_gradient()
            norm, skipped = optimizer_step(backend, module, optimizer, lr, cfg.max_grad_norm)
            state.add_update(norm, skipped, batch, losses)
            techniques.after_update(skipped)
        logger.add_step(losses, totals, data_seconds)
        checkpoints.after_step()
        replica_check.check_replicas(backend, model, state.step, due.replica_check())  # each save checks, too

    if not due.complete():
        checkpoints.stop()  # never returns: saves, then exit code 75; the same command resumes
    checkpoints.write_final()  # final/: a folder for from_pretrained
    logger.finish(checkpoints.summary(), checkpoints.sample(), checkpoints.outcome())


def compute_gradient(backend, module: torch.nn.Module, batch: StepBatch, totals: StepTotals) -> StepLosses:
    """Fill `.grad` with the gradient of (sum of losses) / (sum of weights) over all ranks; return this rank's losses.

    A loss that is not finite on one rank makes the gradient of every rank non-finite. Nothing here waits for the
    device."""
    scale = backend.loss_scale(totals)  # 1 / weight, times the ranks that the backend averages gradients over
    device = backend.accelerator.device
    outputs = []
    for micro, rows in batch:
        inputs = {name: value.to(device, non_blocking=True) for name, value in rows.inputs.items()}
        seeding.seed_everything(micro.seed)  # dropout depends on the micro-batch, not on the rank
        with backend.no_sync(module, unless=micro.last):  # one reduction of gradients per step
            out = module(inputs)
            # The factor is exactly `scale`, or NaN if the loss is not finite. An infinite loss can have a finite
            # gradient, which only this rank would notice; the all-reduce of gradients takes the NaN to all ranks.
            factor = 0.0 * out["loss"].detach() + (0.0 if micro.dummy else scale)
            backend.accelerator.backward(out["loss"] * factor)
        outputs.append({name: value.detach() for name, value in out.items() if value.dim() == 0})
    return StepLosses.of(batch, outputs)


def optimizer_step(
    backend, module: torch.nn.Module, optimizer, learning_rate: float, max_grad_norm: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip, update and clear the gradient; return (its norm before clipping, whether the update was skipped).

    An update with a gradient norm that is not finite is skipped: weights and moments stay unchanged on all ranks."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_factor"]  # of `backend.prepare`
    norm = backend.clip_grad_norm(module, max_grad_norm)
    skipped = backend.must_skip(norm)  # on the device: the norm is not finite, or a technique says so
    if backend.allows_step(optimizer, skipped):  # a fused optimizer reads `skipped` itself; for others the host waits
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, skipped


if __name__ == "__main__":
    run_main(main)
