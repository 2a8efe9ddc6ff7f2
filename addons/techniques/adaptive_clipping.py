"""Adaptive gradient clipping, after Brock et al. 2021, "High-Performance Large-Scale Image Recognition Without
Normalization" (section 4.1).

Tests: tests/addons/techniques/test_adaptive_clipping.py.
"""

from dataclasses import dataclass

import torch

from addons.techniques import Technique
from engine.config.option import option
from src.training.optimizers import first_match, named_parameters

SMALLEST_NORM = 1e-6  # of a gradient, against a division by zero; as in timm


def unit_norms(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm of each unit, a slice of the first dimension; of the whole tensor if it has one dimension."""
    dims = tuple(range(1, tensor.dim())) or None
    return torch.linalg.vector_norm(tensor, dim=dims, keepdim=True)


@dataclass(eq=False)
class AdaptiveClipping(Technique):
    """Limit the gradient of each unit to `clip_factor` times the norm of its weights, before max_grad_norm.

    A unit is a slice of the first dimension: an output of a linear or convolutional layer, a row of an embedding. A
    parameter of one dimension is one unit. FSDP2 shards the first dimension, so only the latter costs a collective."""

    order = 52

    clip_factor: float = option(
        "largest norm of a unit's gradient, as a share of the norm of its weights", 0.01, above=0
    )
    eps: float = option("smallest norm of weights that counts, so that units can grow from zero", 1e-3, above=0)
    exclude: list[str] = option("name patterns of parameters that are not clipped, such as lm_head.*", [])

    def check(self) -> None:
        names = named_parameters(self.run.model)
        excluded = first_match(self.exclude, names, "techniques: adaptive_clipping: exclude")
        self.clipped = [p for name, p in names.items() if name not in excluded]

    def change_gradient(self) -> None:
        for parameter in self.clipped:
            if parameter.grad is None:
                continue
            limits = unit_norms(parameter.detach()).clamp(min=self.eps) * self.clip_factor
            norms = unit_norms(parameter.grad)
            factors = torch.where(norms > limits, limits / norms.clamp(min=SMALLEST_NORM), torch.ones_like(norms))
            # 0 × a norm that is not finite is NaN: then the update is skipped, also if only the squares overflow.
            parameter.grad.mul_(factors + 0 * norms)
