"""Muon for the matrices of hidden layers, AdamW for embeddings, heads, norms and biases: one optimizer for the run.

Muon orthogonalizes the momentum of a matrix (Jordan 2024, https://kellerjordan.github.io/posts/muon; torch.optim.Muon).
Its rate is scaled to the size of AdamW's updates (Liu 2025, arXiv:2502.16982), so that one learning_rate fits both.
Tests: tests/addons/optimizers/test_muon.py.
"""

from collections import defaultdict
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from engine.config.run_config import RunConfig
from src.training.optimizers import dimensions, layer_depths, named_parameters

reads_adam_fields = True  # adam_beta1 and others, for the part that AdamW updates
STATE_PER_WEIGHT = {"muon": 1}


def hidden_matrices(model: torch.nn.Module, optim: str) -> set[str]:
    """Return the names of the matrices in the layers of the model that are no embeddings."""
    depths, layers = layer_depths(model)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    matrices = {name: p for name, p in named_parameters(model).items() if dimensions(p) == 2 and id(p) not in tables}
    return {name for name in matrices if 0 < depths[name] <= layers}


def make(cfg: RunConfig, kind: type, groups: list[dict], options: dict[str, Any]) -> torch.optim.Optimizer:
    """Return the optimizer of these groups: Muon of torch together with AdamW."""
    return MuonWithAdamW(groups, options, {"betas": (cfg.adam_beta1, cfg.adam_beta2), "eps": cfg.adam_epsilon})


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers of torch that share one list of groups and one state; a group's `hidden` says which updates it."""

    def __init__(self, groups: list[dict], muon: dict[str, Any], adamw: dict[str, Any]):
        super().__init__(groups, {"lr": muon["lr"]})
        defaults = {"adjust_lr_fn": "match_rms_adamw"}
        self.parts = {}
        for hidden, kind, options in ((True, torch.optim.Muon, defaults | muon), (False, torch.optim.AdamW, adamw)):
            chosen = [group for group in self.param_groups if group["hidden"] == hidden]
            if chosen:
                self.parts[hidden] = part = kind([dict(group) for group in chosen], **options)
                part.param_groups.clear()  # `step` gives it the groups; their parameters may be sharded by then

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all parameters. Accelerate and `load_state_dict` replace groups and state, so they are linked here."""
        for hidden, optimizer in self.parts.items():
            optimizer.param_groups = [g for g in self.param_groups if g["hidden"] == hidden]
            for group in optimizer.param_groups:
                for name, value in optimizer.defaults.items():
                    group.setdefault(name, value)
            optimizer.state = self.state
            if hidden and any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
                self._step_whole_matrices(optimizer)
            else:
                optimizer.step()

    def _step_whole_matrices(self, muon: torch.optim.Optimizer) -> None:
        """Update sharded matrices as if they were whole: each rank gathers one after the other, with its momentum.

        torch would orthogonalize shards, too, but adds their products in bfloat16, which gives another result."""
        groups, muon.param_groups = muon.param_groups, []
        for group in groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                update = torch.zeros_like(gradient := parameter.grad.full_tensor())
                update.grad = gradient
                muon.param_groups = [group | {"params": [update], "weight_decay": 0.0}]
                muon.state = defaultdict(dict, {update: {"momentum_buffer": momentum.full_tensor()}})
                muon.step()
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                mine = distribute_tensor(update, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(mine)
