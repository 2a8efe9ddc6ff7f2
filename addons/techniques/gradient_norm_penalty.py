# Needs addons/techniques/sam.py.
"""A penalty on the norm of the gradient, by a gradient at perturbed weights."""

from dataclasses import dataclass

from addons.techniques.sam import SAM
from engine.config.option import option


@dataclass(eq=False)
class GradientNormPenalty(SAM):
    """Train on loss + alpha · rho · ‖g‖, by (1 − alpha) g(w) + alpha g(w + rho · g / ‖g‖).

    Reference: Zhao et al. 2022, arXiv 2202.03599. No second derivative is needed, so it works sharded, compiled and
    with accumulation."""

    order = 22

    alpha: float = option("share of the gradient at the moved weights; 1: SAM", 0.8, above=0, max=1)
    copies_in_step = 2  # and the first gradient
