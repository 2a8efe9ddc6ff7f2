"""Techniques (SAM, EMA, …) as train.py calls them: methods that do nothing in a run without techniques.

A run file names techniques in the field `techniques`; they are add-ons (addons/techniques/). Tests:
tests/engine/run/test_techniques.py.
"""

from collections.abc import Callable
from typing import Any

import torch

from engine.config.find_addons import first_answer
from engine.config.run_config import RunConfig
from engine.run.totals_and_votes import ComputeGradient
from engine.run.train_state import Run


class Techniques:
    """No techniques. addons/techniques/ overrides these methods."""

    copies = 0  # of the trained weights, in float32, that checkpoints hold
    copies_in_step = 0  # of them in memory within a step
    final = ""  # name of the technique that averages the weights in final/

    def change_model(self, model: torch.nn.Module, cfg: RunConfig) -> None:
        """Change the model before it is compiled, wrapped and given to the optimizer."""

    def begin(self, run: Run) -> dict[str, Any]:
        """Prepare for training; return what a checkpoint holds beside the model, by name: objects with a state dict.

        engine/checkpointing/ calls it before it loads a checkpoint."""
        return {}

    def wrap_gradient(self, compute: ComputeGradient) -> ComputeGradient:
        """Return `compute`, such as compute_gradient of train.py, with what techniques do around it."""
        return compute

    def change_gradient(self) -> None:
        """Change the gradient of the global batch before it is clipped by its norm."""

    def after_update(self, skipped: torch.Tensor) -> None:
        """Use or change the weights after the optimizer's update; `skipped` is a bool on the device."""

    def evaluate(self, metrics: dict | None, evaluate: Callable[[], dict | None]) -> dict | None:
        """Return the metrics of the weights, and those of other weights (averages) as NAME/metric.

        `evaluate` computes the metrics of the weights that the model has. None: a stop request interrupted it."""
        return metrics

    def load_final(self, load: Callable[[str, Any], None] | None) -> bool:
        """Give the model the average that is named `final`; return whether there is one.

        `load(name, part)`, if it is given, first restores a part of the checkpoint of another step."""
        return False

    def plan(self) -> dict[str, str]:
        """Return the rows of the plan that say what is used."""
        return {}


def make_techniques(cfg: RunConfig) -> Techniques:
    """Return the techniques that the run file names."""
    techniques = first_answer(each.make_techniques(cfg) for each in cfg.addons)
    return Techniques() if techniques is None else techniques
