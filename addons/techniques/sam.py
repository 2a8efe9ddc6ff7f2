"""Sharpness-aware minimization (SAM): the gradient at perturbed weights.

The first pass over the batch gives the gradient of the global batch, by which the weights move uphill; the second
pass, with the same dropout, gives the gradient there. Twice the time, and the memory of one more copy of the weights.
"""

from dataclasses import dataclass

import torch

from addons.techniques import Compute, Technique
from engine.config.option import option
from engine.distributed.sharded_tensors import total_norm
from engine.run.totals_and_votes import StepBatch, StepLosses, StepTotals

SMALLEST_NORM = 1e-12  # a gradient of zero moves nothing


@dataclass(eq=False)
class SAM(Technique):
    """Train with the gradient at w + rho · g / ‖g‖ (Foret et al. 2021, arXiv 2010.01412). Losses are those at w."""

    order = 20

    rho: float = option("length of the move of the weights along the gradient", 0.05, above=0)
    alpha = 1.0  # share of the gradient at the moved weights
    copies_in_step = 1  # the weights before the move
    moves_weights = True

    def around_gradient(self, compute: Compute, batch: StepBatch, totals: StepTotals) -> StepLosses:
        losses = compute(batch, totals)
        trained = {name: p for name, p in self.run.parameters().items() if p.grad is not None}
        first = {} if self.alpha == 1 else {name: p.grad * (1 - self.alpha) for name, p in trained.items()}
        before = [parameter.detach().clone() for parameter in trained.values()]
        try:
            zero = self._move(trained)
            with self.run.backend.buffers.unchanged():  # running statistics count only the unmoved weights
                compute(batch, totals)
        finally:
            for parameter, value in zip(trained.values(), before, strict=True):
                parameter.detach().copy_(value)  # bitwise; subtracting the move would round
        for name, parameter in self.run.parameters().items():
            if parameter.grad is not None:
                parameter.grad.mul_(self.alpha + zero)
            if name in first:
                parameter.grad = first[name] if parameter.grad is None else first[name].add_(parameter.grad)
        return losses

    @torch.no_grad()
    def _move(self, parameters: dict[str, torch.nn.Parameter]) -> torch.Tensor:
        """Move the parameters uphill and clear their gradients. Return 0, or NaN if their gradient was not finite.

        Such a gradient moves nothing; the NaN goes into the gradient of the step, so that the update is skipped.
        A gradient scaler (fp16) has no effect, because its scale is in the gradient and in the norm."""
        scaled = {name: self.scale(name, p, p.grad) for name, p in parameters.items()}
        norm = total_norm(list(scaled.values()))
        factor = self.rho / norm.clamp(min=SMALLEST_NORM)
        for name, parameter in parameters.items():
            move = self.scale(name, parameter, scaled[name]) * factor
            parameter.add_(torch.where(norm.isfinite(), move, 0.0))
            parameter.grad = None
        return 0.0 * norm

    def scale(self, name: str, parameter: torch.nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        """Return `value` in the units in which the length of the move is measured."""
        return value
