"""Muon for the matrices of hidden layers, AdamW for embeddings, heads, norms and biases: one optimizer for the run.

Muon orthogonalizes the momentum of a matrix (Jordan 2024, https://kellerjordan.github.io/posts/muon; torch.optim.Muon).
Its rate is scaled to the size of AdamW's updates (Liu 2025, arXiv:2502.16982), so that one learning_rate fits both.
Tests: tests/training/test_optimizers.py.
"""

from typing import Any

import torch

from src.config.errors import UsageError
from src.distributed.sharded_tensors import is_partial


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers of torch that share one list of groups and one state; a group's `hidden` says which updates it."""

    def __init__(self, groups: list[dict], muon: dict[str, Any], adamw: dict[str, Any]):
        super().__init__(groups, {"lr": muon["lr"]})
        defaults = {"adjust_lr_fn": "match_rms_adamw"}
        self.parts = {}
        for hidden, kind, options in ((True, torch.optim.Muon, defaults | muon), (False, torch.optim.AdamW, adamw)):
            own = [group for group in self.param_groups if group["hidden"] == hidden]
            if own:
                self.parts[hidden] = kind([dict(group) for group in own], **options)
                self.parts[
                    hidden
                ].param_groups.clear()  # `step` gives it the groups, whose parameters may be sharded by then

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all parameters. Accelerate and `load_state_dict` replace groups and state, so they are linked here."""
        for hidden, optimizer in self.parts.items():
            optimizer.param_groups = [g for g in self.param_groups if g["hidden"] == hidden]
            for group in optimizer.param_groups:
                for name, value in optimizer.defaults.items():
                    group.setdefault(name, value)
            if hidden and any(is_partial(p) for group in optimizer.param_groups for p in group["params"]):
                raise UsageError("optim is muon, which needs whole matrices: it does not support sharded models")
            optimizer.state = self.state
            optimizer.step()
