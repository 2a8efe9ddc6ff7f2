"""Parameter names as checkpoints hold them, and the patterns by which options choose parameters.

A pattern is a whole name in which `*` stands for any text: `*.attn.*`. Tests: tests/training/test_parameter_groups.py.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch

from src.config.errors import UsageError, did_you_mean
from src.distributed.sharded_tensors import plain_name
from src.training.step import ModelWithLoss


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters by the names that checkpoints hold; tied ones once."""
    model = model.model if isinstance(model, ModelWithLoss) else model
    return {plain_name(name): p for name, p in model.named_parameters()}


def matching(pattern: str, names: Iterable[str], field: str) -> list[str]:
    """Return the names that the pattern of `field` matches; raise UsageError if there is none."""
    names = list(names)
    if found := [name for name in names if fnmatchcase(name, pattern)]:
        return found
    similar = did_you_mean(pattern, names) or f"; the names are {', '.join(names[:5])}, …"
    raise UsageError(f"{field}: {pattern} matches no parameter{similar} (* stands for any text)")


def first_match(patterns: Iterable[str], names: Iterable[str], field: str) -> dict[str, str]:
    """Return {name: first pattern that matches it}; raise UsageError for a pattern that matches no name."""
    names, found = list(names), {}
    for pattern in patterns:
        for name in matching(pattern, names, field):
            found.setdefault(name, pattern)
    return found
