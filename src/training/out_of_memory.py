"""Out of memory in a step: all ranks skip its update, halve the micro-batch and repeat the step on the same examples.

The rank that ran out of memory still takes part in the reduction, with a gradient that is not a number. So every rank
skips the update on its device, and no rank waits for one that has left. The request travels in the totals of the next
step. Tests: tests/training/test_out_of_memory.py.
"""

import gc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from src.config.errors import warn
from src.config.schema import RunConfig
from src.distributed.strategies import Strategy
from src.runtime import private_apis
from src.training.train_state import TrainState, Window

if TYPE_CHECKING:
    from src.training.techniques.base import Run

WORDS = ("can't allocate memory", "out of memory")


def can_repeat(strategy: Strategy) -> bool:
    """Return whether this run can repeat a step; the same on every rank.

    Not with sharded models (each forward pass is a collective) or PowerSGD on several processes, streams."""
    several, hook = strategy.accelerator.num_processes > 1, strategy.cfg.ddp_comm_hook
    alone = several and "power_sgd" in hook
    return strategy.repeats_steps and not (strategy.is_sharded or alone or strategy.cfg.streaming)


def check_survivable(error: RuntimeError, strategy: Strategy, module: torch.nn.Module, window: Window) -> None:
    """Raise `error` again if it is another one, or if other ranks wait in a collective that this rank has left.

    This cannot be survived: where no step can be repeated, a loss over the whole batch on several processes, a reduction
    that has begun, micro-batches of one row."""
    if not isinstance(error, torch.OutOfMemoryError) and not any(word in str(error) for word in WORDS):
        raise error
    cfg, several = strategy.cfg, strategy.accelerator.num_processes > 1
    most = max(len(micro.ids) for micro, _ in window)  # fewer than `given` if the run has halved its micro-batches
    given = cfg.per_device_batch_tokens or most
    field = "per_device_batch_tokens" if cfg.per_device_batch_tokens else "per_device_batch_size"
    smaller = f"--{field} {given // 2}" if most > 1 else "--gradient_checkpointing true, or shorter rows"
    vars(error)["smaller_batch"] = smaller  # for the last line that this rank prints
    has_batch_loss = bool(getattr(module, "module", module).batch_loss)
    if not can_repeat(strategy) or (several and has_batch_loss):
        raise error
    if most == 1:
        raise error
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        try:
            private_apis.check_reduced(module)
        except RuntimeError:
            raise error from None


def give_up_gradient(
    strategy: Strategy, module: torch.nn.Module, window: Window
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Free memory and make the gradient of all ranks NaN; return losses and sums as `_backward` of step.py does."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    strategy.out_of_memory = 1.0
    strategy.buffers.spoil()
    last = replace(window[-1][0], dummy=True, last=True)
    with strategy.gradient_sync(module, True):
        loss = module(None)["loss"]
        strategy.backward(module, loss, last)
    return [torch.zeros_like(loss)] * len(window), {}


def ranks(run: "Run") -> float:
    """Return the number of ranks that ran out of memory in the last step; a collective on the host."""
    return run.hosts.sum([run.strategy.out_of_memory])[0].item() if can_repeat(run.strategy) else 0.0


def repeat_if_due(run: "Run", logger: Any, due: float) -> None:
    """Before something of the last step is logged, evaluated or saved: ask the ranks now whether it must be repeated."""
    if due:
        repeat_step(run, logger, ranks(run))


def repeat_step(run: "Run", logger: Any, ranks: float) -> bool:
    """If `ranks` is not 0, undo the last step (its update was skipped), halve the micro-batch, and return True."""
    if not ranks:
        return False
    strategy, state, cfg = run.strategy, run.state, run.cfg
    strategy.out_of_memory = 0.0
    strategy.buffers.undo_step()
    rows, tokens = state.batch_limits(cfg)
    given, used = cfg.per_device_batch_tokens or int(cfg.per_device_batch_size), max(1, (tokens or rows) // 2)
    state.smaller_batch = {"given": given, "used": used}
    name = "per_device_batch_tokens" if tokens else "per_device_batch_size"
    warn(
        f"step {state.step}: {ranks:.0f} of {strategy.accelerator.num_processes} ranks ran out of memory with {name} "
        f"{tokens or rows}: all ranks repeat the step with {used}; the global batch stays the same"
    )
    state.step -= 1
    state.pending = None
    state.events.append({"kind": "out_of_memory", name: used, "ranks": int(ranks)})
    logger.undo_step()
    return True


def note(cfg: RunConfig, state: TrainState) -> list[str]:
    """Return a message if a resumed run has smaller micro-batches than its run file says."""
    given = (cfg.per_device_batch_size, cfg.per_device_batch_tokens)
    if cfg.per_device_batch_size == "auto" or state.batch_limits(cfg) == given:
        return []
    rows, tokens = state.batch_limits(cfg)
    what = f"{tokens:,} tokens" if tokens else f"{rows:,} rows"
    return [f"micro-batches have up to {what}, fewer than the run file says, because a rank had run out of memory"]
