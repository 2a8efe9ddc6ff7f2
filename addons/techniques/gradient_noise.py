"""Noise added to the gradient, after Neelakantan et al. 2015, "Adding Gradient Noise Improves Learning".

Tests: tests/addons/techniques/test_gradient_noise.py.
"""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from addons.techniques import Technique
from engine.config.option import option
from engine.distributed.sharded_tensors import plain_name
from engine.plan.batch_plan import derive_seed


@dataclass(eq=False)
class GradientNoise(Technique):
    """Add Gaussian noise of variance eta / (1 + t) ** gamma to the gradient of the global batch; t counts updates.

    The noise of a parameter depends on (seed, step, its name) only. Each process draws it for the whole model, and a
    sharded one takes its shard: no communication, but the memory of the largest parameter once more. A GPU and a CPU
    draw different numbers."""

    order = 51

    eta: float = option("variance of the noise before the first update", 0.01, above=0)
    gamma: float = option("how fast the variance falls: eta / (1 + updates) ** gamma", 0.55, min=0)

    def change_gradient(self) -> None:
        deviation = (self.eta / (1 + self.run.state.updates) ** self.gamma) ** 0.5
        for name, parameter in self.run.parameters().items():
            if (gradient := parameter.grad) is not None:
                gradient.add_(self._noise(name, gradient), alpha=deviation)

    def _noise(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return standard normal numbers in the shape of `like`, its shard if it is sharded."""
        seed = derive_seed("gradient noise", self.run.cfg.seed, self.run.state.step, plain_name(name))
        generator = torch.Generator(like.device).manual_seed(seed)
        numbers = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
        if isinstance(like, DTensor):  # None: every rank has drawn the same, so nothing is sent
            return distribute_tensor(numbers, like.device_mesh, like.placements, src_data_rank=None)
        return numbers
