"""Noise added to the gradient, after Neelakantan et al. 2015, "Adding Gradient Noise Improves Learning".

Tests: tests/addons/techniques/test_gradient_noise.py.
"""

from dataclasses import dataclass

from addons.techniques import Technique, noise
from src.config.fields import option


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
        state = self.run.state
        deviation = (self.eta / (1 + state.updates) ** self.gamma) ** 0.5
        for name, parameter in self.run.parameters().items():
            if (gradient := parameter.grad) is None:
                continue
            gradient.add_(noise(self.run, "gradient noise", name, gradient), alpha=deviation)
