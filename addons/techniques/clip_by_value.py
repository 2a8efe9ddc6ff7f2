"""Gradient clipping by value: each element of the gradient of the global batch is limited to [-limit, limit]."""

from dataclasses import dataclass

from addons.techniques import Technique
from engine.config.option import option


@dataclass(eq=False)
class ClipByValue(Technique):
    """Limit each element of the gradient; before clipping by its norm (max_grad_norm), if both are on."""

    order = 53

    limit: float = option("largest absolute value of an element of the gradient", 1.0, above=0)

    def change_gradient(self) -> None:
        for parameter in self.run.parameters().values():
            if (gradient := parameter.grad) is not None:
                # 0 × infinity is NaN: an infinite gradient must not look finite, so that the update is skipped.
                gradient.copy_(gradient.clamp(-self.limit, self.limit) + 0 * gradient)
