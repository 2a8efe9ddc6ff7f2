"""Memory format channels_last of convolutions, which tensor cores compute without transposing.

Tests: tests/addons/techniques/test_channels_last.py.
"""

from dataclasses import dataclass
from typing import Any

import torch

from addons.techniques import Technique
from engine.config.errors import UsageError
from engine.config.run_config import RunConfig


@dataclass(eq=False)
class ChannelsLast(Technique):
    """Keep weights of convolutions and images in memory as (rows, height, width, channels); shapes do not change.

    Numbers change by rounding only. Checkpoints and final/ are contiguous. Under FSDP2, only the images change."""

    order = 40

    def change_model(self, model: torch.nn.Module, cfg: RunConfig) -> None:
        if not any(p.dim() == 4 for p in model.parameters()):
            raise UsageError("techniques: channels_last: the model has no convolution over images: remove it")
        model.to(memory_format=torch.channels_last)  # type: ignore
        model.model.register_forward_pre_hook(_images_last, with_kwargs=True)


def _images_last(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return tuple(_channels_last(value) for value in args), {n: _channels_last(value) for n, value in kwargs.items()}


def _channels_last(value: Any) -> Any:
    is_image = torch.is_tensor(value) and value.dim() == 4 and value.is_floating_point()
    return value.contiguous(memory_format=torch.channels_last) if is_image else value
