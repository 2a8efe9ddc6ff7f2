"""Rollback of a running training to an earlier checkpoint: weights, optimizer, techniques and schedule, not the data.

Tests: tests/training/techniques/test_spike_watch.py.
"""

from pathlib import Path

import torch

from src.checkpointing.checkpoint_format import load_checkpoint
from src.checkpointing.checkpoint_list import list_checkpoints, may_return_to, step_of
from src.config.errors import Failure
from src.config.schema import RunConfig
from src.distributed.host_group import run_on_main
from src.distributed.sharded_tensors import plain_name
from src.distributed.step_buffers import persistent_buffers
from src.distributed.strategies import Strategy
from src.storage import atomic_folder
from src.training.step import ModelWithLoss
from src.training.train_state import TrainState


def roll_back(
    strategy: Strategy, cfg: RunConfig, model_with_loss: ModelWithLoss, parts: dict, state: TrainState, before: int
) -> int | None:
    """Restore the newest intact checkpoint below step `before` at a multiple of save_steps, on all ranks.

    Return its step, None without one.

    The step counter continues, so data, ledger and metrics stay functions of the step. `updates` returns to that of the
    checkpoint, and with it the learning rate. Checkpoints of steps that an earlier call has undone do not count."""
    checkpoint = run_on_main(strategy.accelerator, lambda: _choose(cfg, state, before))
    if checkpoint is None:
        return None
    restore_weights(strategy, model_with_loss, checkpoint)
    then = load_checkpoint(checkpoint, strategy, model_with_loss, parts)
    state.updates, state.skipped, state.pending = then.updates, then.skipped, None
    event = {"kind": "roll_back", "to": then.step, "before": before}
    state.rollbacks.append({"step": state.step} | event)
    state.events.append(event)
    return then.step


def _choose(cfg: RunConfig, state: TrainState, before: int) -> Path | None:
    for path in reversed(list_checkpoints(cfg.output_dir)):
        step = step_of(path)
        allowed = step is not None and step < before and may_return_to(step, cfg, state.rollbacks)
        if allowed and not atomic_folder.verify(path):
            return path
    return None


@torch.no_grad()
def restore_weights(strategy: Strategy, model_with_loss: ModelWithLoss, checkpoint: Path) -> None:
    """Copy the weights and buffers of `checkpoint` into the live model.

    A second model is built on the CPU, as for a resumed run, because transformers saves some models under other names.
    If the main process alone builds it (FSDP2), it sends each rank its shard."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    saved, live = strategy.build_model(model_with_loss.task, checkpoint), model_with_loss.model
    values = dict(saved.named_parameters(remove_duplicate=False)) | persistent_buffers(saved)
    device, several = strategy.accelerator.device, strategy.accelerator.num_processes > 1
    for name, target in [*live.named_parameters(), *persistent_buffers(live).items()]:
        if plain_name(name) not in values:
            raise Failure(f"{checkpoint} cannot be restored during training: it has no {plain_name(name)}")
        value = values[plain_name(name)].detach().to(device)
        if isinstance(target, DTensor):
            value = distribute_tensor(value, target.device_mesh, target.placements)
        elif several:
            value = value.contiguous()
            torch.distributed.broadcast(value, 0)
        target.copy_(value)
