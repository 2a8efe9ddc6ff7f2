"""Norms of the gradient, the weights and the update of each layer, in the train lines of metrics.jsonl.

Tests: tests/addons/techniques/test_gradient_statistics.py.
"""

import re
from dataclasses import dataclass

import torch

from addons.techniques import Technique
from engine.config.option import option
from engine.distributed.sharded_tensors import gather_full
from src.training.optimizers import matching, named_parameters

VALUES = ("grad_norm", "weight_norm", "update_ratio")


@dataclass(eq=False)
class GradientStatistics(Technique):
    """Add `grad_norm/LAYER`, `weight_norm/LAYER` and `update_ratio/LAYER` of the last step to each train line.

    The gradient is that of the global batch, before other techniques and max_grad_norm change it; the ratio is the norm
    of the update by the norm of the weights before it. Only steps that end in a train line compute them, on the device:
    one pass over the weights for each value, under FSDP2 a small collective for each parameter; update_ratio copies the
    weights for the rest of that step."""

    order = 0

    values: list[str] = option(f"what to log, of {', '.join(VALUES)}", ["grad_norm"])
    groups: dict | None = option("groups of parameters as {NAME: PATTERN, …} (default: one for each layer)")

    changes_training = False

    def errors(self) -> list[str]:
        return [f"values: {name!r} is not one of {', '.join(VALUES)}" for name in self.values if name not in VALUES]

    def check(self) -> None:
        self.members: dict[str, list[torch.nn.Parameter]] = {}
        named = {name: p for name, p in named_parameters(self.run.model).items() if p.requires_grad}
        if self.groups is None:
            for name, parameter in named.items():
                self.members.setdefault(layer_of(name), []).append(parameter)
        for group, pattern in (self.groups or {}).items():
            names = matching(pattern, named, f"techniques: gradient_statistics: groups: {group}")
            self.members[group] = [named[name] for name in names]

    def begin(self) -> None:
        self.before: dict[str, list[torch.Tensor]] = {}  # weights of a step that will be logged

    def change_gradient(self) -> None:
        state = self.run.state
        if state.step % self.run.cfg.logging_steps and state.step < self.run.num_steps:
            return
        for group, parameters in self.members.items():
            if "grad_norm" in self.values:
                gradients = [p.grad for p in parameters if p.grad is not None]
                state.line_values[f"grad_norm/{group}"] = norm(gradients) if gradients else None
            if "weight_norm" in self.values:
                state.line_values[f"weight_norm/{group}"] = norm(parameters)
            if "update_ratio" in self.values:
                self.before[group] = [p.detach().clone() for p in parameters]

    def after_update(self, skipped: torch.Tensor) -> None:
        for group, before in self.before.items():
            change = [p.detach() - old for p, old in zip(self.members[group], before, strict=True)]
            self.run.state.line_values[f"update_ratio/{group}"] = norm(change) / norm(before)
        self.before = {}


def layer_of(name: str) -> str:
    """Return the name of a parameter's layer: up to its first number, else that of its module."""
    numbered = re.match(r"(.*?\.\d+)\.", name)
    return numbered[1] if numbered else name.rpartition(".")[0] or name


def norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all values in `tensors`, on the device; a collective if they are sharded."""
    return torch.linalg.vector_norm(torch.stack([gather_full(torch.linalg.vector_norm(t.detach())) for t in tensors]))
