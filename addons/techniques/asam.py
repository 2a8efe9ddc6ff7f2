# Needs addons/techniques/sam.py.
"""Adaptive sharpness-aware minimization (ASAM)."""

from dataclasses import dataclass

import torch

from addons.techniques.sam import SAM
from engine.config.option import option


@dataclass(eq=False)
class ASAM(SAM):
    """Move each weight in proportion to its size: by rho · T² g / ‖T g‖, T = |w| + eta, 1 for biases.

    Then scaling one layer up and the next one down changes nothing (Kwon et al. 2021, arXiv 2102.11600)."""

    order = 21

    rho: float = option("length of the move, in units of the weights' sizes", 0.5, above=0)
    eta: float = option("added to the size of each weight, so that weights of zero move, too", 0.01, min=0)

    def scale(self, name: str, parameter: torch.nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        return value if name.endswith("bias") else value * (parameter.abs() + self.eta)
