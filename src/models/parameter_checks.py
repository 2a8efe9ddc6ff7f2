"""Parameters that cannot be trained or saved: refused by name before training.

Tests: tests/models/test_any_module.py.
"""

import torch
from torch.nn.parameter import is_lazy

from src.config.errors import UsageError


def check_parameters(model: torch.nn.Module) -> None:
    """Raise UsageError for a parameter without a shape, with complex values, or with sparse gradients."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UsageError(
                f"{type(model).__name__}: {name} has no shape yet: replace the lazy layer by one with its size, or run a "
                "batch through the model in `build`"
            )
        if parameter.is_complex():
            raise UsageError(
                f"{type(model).__name__}: {name} is {parameter.dtype}, which optimizers here do not train: store its real and "
                "imaginary parts as one real parameter (torch.view_as_real) and join them in `forward`"
            )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            raise UsageError(f"{type(model).__name__}: {name} has sparse gradients: set sparse=False")
