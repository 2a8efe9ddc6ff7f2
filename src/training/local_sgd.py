"""Local SGD: average weights and optimizer state over ranks every `local_sgd_steps`.

For a slow network between whole replicas (DDP). accelerate's LocalSGD averages weights only, by one collective per parameter:
the moments would differ, and no single checkpoint could hold them. Tests: tests/training/test_local_sgd.py.
"""

import torch
import torch.distributed as dist

from src.config.schema import RunConfig
from src.distributed.host_group import HostGroup
from src.distributed.strategies import Strategy
from src.training.train_state import TrainState


class LocalSGD:
    """Ranks update alone; `average` makes their weights, moments and state equal, so that one checkpoint holds them all."""

    def __init__(self, strategy: Strategy, host_group: HostGroup, cfg: RunConfig, optimizer, state: TrainState):
        self.accelerator, self.host_group, self.cfg = strategy.accelerator, host_group, cfg
        self.optimizer, self.state = optimizer, state
        self.averaged_step = state.step  # all ranks begin with the same state
        state.local_updates = True
        if not optimizer.state:
            _create_moments(optimizer)

    def average(self) -> None:
        """Average what differs between ranks; raise Failure on all of them if one has skipped too many updates in a row.

        Collective: one small vector, then one reduction for the weights and one per kind of moment. Each needs one flat copy,
        as much memory as the gradients had, which are freed by now."""
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

    def _tensors_by_kind(self) -> dict[str, list[torch.Tensor]]:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        kinds: dict[str, list[torch.Tensor]] = {"weight": parameters}
        for parameter in parameters:
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(value):  # also the number of updates, which AdamW corrects its moments by
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
    """Give every parameter moments of zero: a rank that skips its first update then has as many to average as the others."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        for value in state.values():
            if torch.is_tensor(value):
                value.zero_()
