"""Copies of what training changes, sharded like the model: for averages of weights and Lookahead.

Tests: tests/addons/techniques/test_averages.py.
"""

import torch

from engine.distributed.running_statistics import persistent_buffers
from engine.distributed.sharded_tensors import local_part, plain_name
from engine.process import private_apis
from engine.run.train_state import Run

Tensors = dict[str, torch.Tensor]  # by name; sharded ones are DTensors


class TrainedTensors:
    """The trainable parameters of a run and, with `buffers`, the buffers that checkpoints hold, by name."""

    def __init__(self, run: Run, buffers: bool = True):
        self.parameters = {plain_name(name): parameter for name, parameter in run.parameters().items()}
        persistent = persistent_buffers(run.model) if buffers else {}
        places = {name: name.rpartition(".") for name in persistent}
        # A module may replace a buffer, so look it up by name.
        self.owners = {
            plain_name(name): (run.model.get_submodule(path), leaf) for name, (path, _, leaf) in places.items()
        }

    def now(self) -> Tensors:
        """Return the tensors themselves."""
        return self.parameters | {name: getattr(*owner) for name, owner in self.owners.items()}

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    @torch.no_grad()
    def copy(self) -> Tensors:
        """Return copies; numbers of 16 bits in float32, because in 16 bits the small moves of an average vanish."""
        return {name: value.detach().to(_wide(value.dtype), copy=True) for name, value in self.now().items()}

    @torch.no_grad()
    def move(self, targets: Tensors, sources: Tensors, share: float | torch.Tensor) -> None:
        """Add `share` * (source - target) to each target of the same names as `now`.

        Buffers that are whole numbers are copied, and so are numbers of buffers that would not be finite."""
        floats = [name for name, value in targets.items() if _can_move(value)]
        private_apis.move_all_(*_local_parts(targets, sources, floats), share)
        for name in self.owners:
            value, source = targets[name], sources[name]
            if _can_move(value):  # a constant -inf, as in a mask, minus itself is not a number
                source = torch.where(value.isfinite(), value, source.to(value.dtype))
            value.copy_(source)


def _can_move(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


@torch.no_grad()
def assign(targets: Tensors, sources: Tensors) -> None:
    """Copy each source into the target of its name, in one kernel."""
    private_apis.copy_all_(*_local_parts(targets, sources, list(sources)))


def _local_parts(targets: Tensors, sources: Tensors, names: list[str]) -> tuple[list, list]:
    return [local_part(targets[name]) for name in names], [local_part(sources[name]) for name in names]
