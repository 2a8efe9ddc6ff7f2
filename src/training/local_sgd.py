"""Local SGD: average weights and optimizer state over ranks every `local_sgd_steps`.

For DDP over a slow network. accelerate's LocalSGD averages only the weights, with one collective per parameter. The
moments would differ between ranks, so one checkpoint could not hold them. Tests: tests/training/test_local_sgd.py.
"""

import torch
import torch.distributed as dist

from src.config.schema import RunConfig
from src.distributed.host_group import HostGroup
from src.distributed.step_buffers import StepBuffers
from src.distributed.strategies import Strategy
from src.training.train_state import TrainState


class LocalSGD:
    """Ranks update independently; `average` makes weights, moments and state equal, so one checkpoint holds them."""

    def __init__(self, strategy: Strategy, host_group: HostGroup, cfg: RunConfig, optimizer, state: TrainState):
        self.accelerator, self.host_group, self.cfg = strategy.accelerator, host_group, cfg
        self.optimizer, self.state = optimizer, state
        self.averaged_step = state.step  # all ranks begin with the same state
        state.local_updates = True
        _create_moments(optimizer)
        self.buffers = StepBuffers(strategy.buffers.module, self.accelerator.device, all_ranks=True)
        self.buffers.begin()

    def average(self) -> None:
        """Average weights, moments and buffers over ranks; raise Failure on all if one skipped too many in a row.

        Collective: an all-reduce of a small vector, then of the weights and of each kind of moment as one flat copy.
        The copy is the size of the gradients, which are freed by now."""
        state, most = self.state, self.cfg.max_skipped_steps
        if state.step == self.averaged_step:
            return
        self.averaged_step = state.step
        state.finish_update(most)
        skipped = [0.0] * self.accelerator.num_processes
        skipped[self.accelerator.process_index] = float(state.skipped)
        state.skipped = int(self.host_group.sum(skipped).max())
        state.check_skipped(most, state.step)
        for tensors in self._tensors_by_kind().values():
            self._average_tensors(tensors)
        self.buffers.record()
        self.buffers.finish()
        self.buffers.begin()

    def _tensors_by_kind(self) -> dict[str, list[torch.Tensor]]:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        kinds: dict[str, list[torch.Tensor]] = {"weight": parameters}
        for parameter in parameters:
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(value):  # includes AdamW's step count, for its bias correction
                    kinds.setdefault(kind, []).append(value)
        return kinds

    @torch.no_grad()
    def _average_tensors(self, tensors: list[torch.Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(self.accelerator.device)
        if flat.element_size() < 4:
            flat = flat.float()  # a sum in 16 bits would lose small differences between ranks
        dist.all_reduce(flat)
        flat /= self.accelerator.num_processes
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))


def _create_moments(optimizer) -> None:
    """Create the moments that are missing, as zeros, so that a rank that skips its first update has the same tensors to
    average as the others. A resumed run may have some: of what one process has trained so far (unfreeze)."""
    missing = [p for group in optimizer.param_groups for p in group["params"] if p not in optimizer.state]
    for parameter in missing:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for parameter in missing:
        for value in optimizer.state.get(parameter, {}).values():
            if torch.is_tensor(value):
                value.zero_()
