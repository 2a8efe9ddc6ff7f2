"""Adaptive gradient clipping, after Brock et al. 2021, "High-Performance Large-Scale Image Recognition Without
Normalization" (section 4.1).

Tests: tests/training/techniques/test_adaptive_clipping.py.
"""

import re
from dataclasses import dataclass

import torch

from src.config.errors import UsageError
from src.config.fields import option
from src.distributed.sharded_tensors import plain_name
from src.training.techniques.base import Technique

SMALLEST_NORM = 1e-6  # of a gradient, against a division by zero; as in timm


def unit_norms(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm of each unit, a slice of the first dimension; of the whole tensor if it has one dimension."""
    dims = tuple(range(1, tensor.dim())) or None
    return torch.linalg.vector_norm(tensor, dim=dims, keepdim=True)


@dataclass(eq=False)
class AdaptiveClipping(Technique):
    """Limit the gradient of each unit to `clip_factor` times the norm of its weights; before max_grad_norm, if both are on.

    A unit is a slice of the first dimension: an output of a linear or convolutional layer, a row of an embedding. A
    parameter of one dimension is one unit. FSDP2 shards the first dimension, so only the latter costs a collective."""

    clip_factor: float = option(
        "largest norm of a unit's gradient, as a share of the norm of its weights", 0.01, above=0
    )
    eps: float = option("smallest norm of weights that counts, so that units can grow from zero", 1e-3, above=0)
    exclude: list[str] = option("regular expressions: names of parameters that are not clipped, such as lm_head", [])

    def errors(self) -> list[str]:
        return [f"exclude: {pattern!r} is not a regular expression" for pattern in self.exclude if not _valid(pattern)]

    def begin(self) -> None:
        names = [plain_name(name) for name in self.run.parameters()]
        for pattern in self.exclude:
            if not any(re.search(pattern, name) for name in names):
                raise UsageError(
                    f"techniques: adaptive_clipping: exclude: {pattern!r} matches no trainable parameter; the last one is "
                    f"{names[-1]}"
                )

    def change_gradient(self) -> None:
        for name, parameter in self.run.parameters().items():
            if parameter.grad is None or any(re.search(pattern, plain_name(name)) for pattern in self.exclude):
                continue
            limits = unit_norms(parameter.detach()).clamp(min=self.eps) * self.clip_factor
            norms = unit_norms(parameter.grad)
            # A norm that is not finite gives NaN: then the update is skipped.
            factors = torch.where(norms > limits, limits / norms.clamp(min=SMALLEST_NORM), torch.ones_like(norms))
            parameter.grad.mul_(factors)


def _valid(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True
