"""Stochastic depth of a model: the field `stochastic_depth`.

After Huang et al. 2016, "Deep Networks with Stochastic Depth". Tests: tests/addons/models/test_stochastic_depth.py.
"""

from dataclasses import dataclass
from typing import Any

import torch

from engine.config.addon import Addon
from engine.config.errors import UsageError
from engine.config.option import option

BY_ROW = "drop_path_rate"  # field of transformers' configs: a layer is multiplied by zero for some rows


@dataclass(frozen=True)
class StochasticDepth(Addon):
    stochastic_depth: float | None = option(
        "probability of dropping the last layer for a row in training: drop_path_rate of the model's config",
        group="model",
        min=0,
        below=1,
        is_rare=True,
    )

    def change_config(self, cfg: Any, config: Any) -> None:
        """Set `drop_path_rate` of a model's config; raise UsageError if it has no such field."""
        if getattr(config, BY_ROW, None) is None:
            raise self._refusal(f"the config of {config.model_type} has no field {BY_ROW}")
        setattr(config, BY_ROW, self.stochastic_depth)

    def change_built_model(self, task: Any, model: torch.nn.Module, weights: Any, empty: bool) -> None:
        """Raise UsageError for a model that no such config has built."""
        if all(getattr(getattr(module, "config", None), BY_ROW, None) is None for module in model.modules()):
            raise self._refusal(f"{type(model).__name__} is not a model of transformers, whose config sets it")

    def _refusal(self, reason: str) -> UsageError:
        return UsageError(
            f"stochastic_depth is {self.stochastic_depth}, but {reason}: remove it, or use a model that has it "
            "(convnext, swin, dinov2, beit, segformer, …)"
        )
