"""Local SGD: average weights and optimizer state over ranks every few steps.

Tests: tests/training/test_local_sgd.py. For a slow network between whole replicas (DDP). accelerate's
LocalSGD averages weights only, by one collective a parameter: moments would differ, and no one checkpoint could hold them.
"""

import torch
import torch.distributed as dist

from src.config.schema import RunConfig
from src.training.state import TrainState


def begin(accelerator, host_group, cfg: RunConfig, module, optimizer, progress: TrainState) -> tuple:
    """Return (the module to train, a function that averages the ranks' states where they differ).

    Without local SGD these are the module as it was, and a function that does nothing."""
    if not cfg.local_sgd_steps or accelerator.num_processes == 1:
        return module, lambda: None
    # DDP has made the replicas the same; from here on its wrapper would only reduce, and hold as much as all gradients.
    bare = accelerator.unwrap_model(module)
    accelerator.free_memory()
    progress.alone = True
    if not optimizer.state:
        _moments_of_zero(optimizer)
    return bare, Average(accelerator, host_group, cfg, optimizer, progress)


def _moments_of_zero(optimizer) -> None:
    """Give every parameter its moments: a rank whose first update is left out has as many to average as the others."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        for value in filter(torch.is_tensor, state.values()):
            value.zero_()


class Average:
    """Makes weights, moments and progress the same on all ranks; a checkpoint then holds the state of each."""

    def __init__(self, accelerator, host_group, cfg: RunConfig, optimizer, progress: TrainState):
        self.device, self.rank, self.world = accelerator.device, accelerator.process_index, accelerator.num_processes
        self.host_group, self.most, self.optimizer, self.progress = (
            host_group,
            cfg.max_skipped_steps,
            optimizer,
            progress,
        )
        self.step = progress.step  # of the last average: all ranks begin, or go on, with the same state

    def __call__(self) -> None:
        """Average, unless this step is averaged already; Failure on all ranks where one has left out too many updates.

        Collective: one small vector, and one reduction each for the weights and every kind of moment, which is held in
        one piece meanwhile: as much memory as the gradients had, which are gone by then."""
        progress = self.progress
        if progress.step == self.step:
            return
        self.step = progress.step
        progress.finish_update(self.most)
        lost = self.host_group.sum([float(progress.skipped * (rank == self.rank)) for rank in range(self.world)])
        progress.skipped = int(lost.max())
        progress.give_up(self.most, progress.step)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        kinds: dict[str, list[torch.Tensor]] = {"weight": parameters}
        for parameter in parameters:
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(value):  # also the number of updates, by which AdamW corrects its moments
                    kinds.setdefault(kind, []).append(value)
        for tensors in kinds.values():
            self._mean(tensors)

    @torch.no_grad()
    def _mean(self, tensors: list[torch.Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(self.device)
        flat = flat.float() if flat.element_size() < 4 else flat  # 16 bits would lose what a rank has learnt
        dist.all_reduce(flat)
        flat /= self.world
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))
