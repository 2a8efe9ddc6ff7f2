"""The optimizers of the package pytorch_optimizer (requirements-extra.txt) by their names: lion, adan, soap, …

Where torch has the name, too: pytorch_optimizer/NAME. Muon and its relatives get the groups of addons/optimizers/muon.py.
Tests: tests/addons/optimizers/test_pytorch_optimizer.py.
"""

import importlib
from contextlib import suppress
from typing import Any

import torch

from engine.config.find_addons import load_addon
from engine.config.optimizer_class import normalized
from engine.config.run_config import RunConfig

MUONS = ("muon", "adamuon", "adago", "muonclip", "normuon")  # for the matrices of hidden layers
STATE_PER_WEIGHT = {"lion": 1}


def classes() -> list[Any]:
    """Return the contents of the package; nothing if it is not installed."""
    with suppress(ImportError):
        return list(vars(importlib.import_module("pytorch_optimizer")).values())
    return []


def hidden_matrices(model: torch.nn.Module, optim: str) -> set[str] | None:
    """Return the names of the matrices in the layers of the model for Muon and its relatives, None for others."""
    if normalized(optim.rpartition("/")[2]) not in MUONS:
        return None
    return load_addon("optimizers", "muon").hidden_matrices(model, optim)


def make(cfg: RunConfig, kind: type, groups: list[dict], options: dict[str, Any]) -> torch.optim.Optimizer:
    """Return the optimizer of these groups, with the name that the package has for `hidden`."""
    groups = [group | ({"use_muon": group["hidden"]} if "hidden" in group else {}) for group in groups]
    return kind(groups, **options)
