"""Technique: what an entry of the run file's `techniques` may change in a step, an evaluation and a checkpoint.

Write your own as one file here and one line of __init__.py (docs/techniques.md). Tests: tests/training/techniques/.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from src.config.errors import warn
from src.config.schema import RunConfig
from src.data.batch_plan import derive_seed
from src.distributed.host_group import HostGroup
from src.distributed.sharded_tensors import plain_name
from src.distributed.strategies import Strategy
from src.tasks import Task
from src.training.train_state import StepLosses, TrainState, Window

# compute_gradient of src/training/step.py without its first arguments
ComputeGradient = Callable[[Window, float], StepLosses]


@dataclass(eq=False)
class Run:
    """What a technique may read and change in a run. Every rank has one."""

    cfg: RunConfig
    strategy: Strategy
    hosts: HostGroup
    task: Task
    model: torch.nn.Module  # ModelWithLoss: its parameters are trained; sharded under FSDP2
    module: torch.nn.Module  # the wrapped module, to call
    optimizer: torch.optim.Optimizer
    num_steps: int
    state: TrainState  # of the checkpoint, once it is loaded; in a step, state.step already counts this step

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the trainable parameters by name; sharded ones are DTensors."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def noise(self, purpose: str, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return standard normal numbers in the shape of `like` (its shard, if sharded) for a parameter's `name`.

        They depend on `purpose`, the run's seed, the step and `name` only, so they are the same on any number of
        processes and after a resume. Each process draws them for the whole tensor: no communication, but its memory
        once more. A GPU and a CPU draw different numbers."""
        seed = derive_seed(purpose, self.cfg.seed, self.state.step, plain_name(name))
        generator = torch.Generator(like.device).manual_seed(seed)
        noise = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
        if isinstance(like, DTensor):  # None: every rank has drawn the same, so nothing is sent
            return distribute_tensor(noise, like.device_mesh, like.placements, src_data_rank=None)
        return noise


def warn_if_unused(run: Run, name: str, first_step: int) -> None:
    """Warn if the run ends before `first_step`, at which the technique `name` first does something."""
    if first_step > run.num_steps:
        warn(
            f"techniques: {name} has no effect: it begins at step {first_step:,}, but the run has {run.num_steps:,} steps"
        )


class Technique:
    """One technique. Subclass it as a dataclass; its fields, declared by `option(...)`, are its options.

    A method that you do not define does nothing. All ranks call the methods in the same order, so a method may use
    collectives, and none may let a rank decide alone. What it draws at random must depend on (seed, step) or on the
    micro-batch, and what it remembers between steps belongs in `state_dict`: then results do not depend on the number
    of processes, and a resumed run continues exactly."""

    deepspeed = False  # whether it works under DeepSpeed, which owns gradients and weights
    changes_training = True  # False: it changes no number, so a resumed run may add, remove or change it; has no state
    copies = (
        0  # of the trained weights, in float32, that it keeps, also in checkpoints: for estimates of memory and disk
    )
    copies_in_step = 0  # more of them within a step: for the estimate of memory
    moves_weights = False  # whether it computes a gradient at other weights; one technique at most
    final = False  # whether final/ holds `average` instead of the weights of training; one technique at most
    # Options that it no longer has: (value that did what is done without it, what to do instead) by name. Checkpoints of
    # older versions record them.
    removed_options: Mapping[str, tuple[Any, str]] = {}
    run: Run  # set before `begin`

    def errors(self) -> list[str]:
        """Return one sentence for each rule between the options that is violated."""
        return []

    # ---- before training ---------------------------------------------------------------------------------------------

    def change_model(self, model: torch.nn.Module, cfg: RunConfig) -> None:
        """Change the model, or freeze parameters, before it is wrapped and the optimizer is made; add hooks."""

    def check(self) -> None:
        """Raise UsageError if `self.run` does not fit."""

    def begin(self) -> None:
        """Prepare for training with `self.run`. Weights are loaded; in a resumed run, `load_state_dict` follows."""

    # ---- in a step, in this order ------------------------------------------------------------------------------------

    def compute_gradient(self, compute: ComputeGradient, window: Window, total_weight: float) -> StepLosses:
        """Fill `.grad` with the gradient of the step and return the losses; `compute` may be called several times."""
        return compute(window, total_weight)

    def change_gradient(self) -> None:
        """Change `.grad`, the gradient of the global batch on every rank (its shard, if sharded), before it is clipped
        by its norm. It has no loss scale (fp16). Keep what is not finite, so that the update is skipped.

        `self.run.state` has the step and its learning rate. The weights before the update are here for the last
        time."""

    def after_update(self, skipped: torch.Tensor) -> None:
        """Use or change the weights after the optimizer's update; `.grad` is cleared.

        `skipped` is a bool on the device: do not wait for it. The gradient of a skipped update may hold NaN, so commit
        what is remembered of gradients here (`torch.where`). A step without targets calls no technique."""

    # ---- beside the model --------------------------------------------------------------------------------------------

    def average(self) -> dict[str, torch.Tensor] | None:
        """Return weights to evaluate beside those of training (`NAME/loss`), or None; {}: the weights of training.

        Names are those of `run.model` without the prefixes of wrappers; buffers may be among them."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold: a flat dict of tensors (sharded like parameters), numbers and strings."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
