"""Progressive resizing: training begins with small images and ends with full ones (fastai; MosaicML's Composer).

Tests: tests/addons/techniques/test_progressive_resizing.py.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from addons.techniques import Compute, Technique
from engine.config.errors import UsageError
from engine.config.option import option
from engine.config.run_config import RunConfig
from engine.run.model_with_loss import ModelWithLoss
from engine.run.totals_and_votes import StepBatch, StepLosses, StepTotals


@dataclass(eq=False)
class ProgressiveResizing(Technique):
    """Scale training images by `initial_scale`, then by a share that grows linearly to 1; evaluation sees full images.

    The size is a function of the step. Images are scaled on the device, so reading them costs what it did. With
    `compile`, each size is one more graph."""

    order = 41
    depends_on_length = True

    initial_scale: float = option("first height and width, as a share of the full ones", 0.5, above=0, max=1)
    delay_fraction: float = option("share of the steps that have the first size", 0.5, min=0, max=1)
    finetune_fraction: float = option("share of the steps, at the end, that have the full size", 0.2, min=0, max=1)
    multiple: int = option(
        "heights and widths below the full ones are multiples of this (a ViT: of its patches)", 4, min=1
    )

    def errors(self) -> list[str]:
        total = self.delay_fraction + self.finetune_fraction
        return [] if total <= 1 else [f"delay_fraction + finetune_fraction is {total:g}: give at most 1"]

    def change_model(self, model: ModelWithLoss, cfg: RunConfig) -> None:
        inner = getattr(model.model, "get_base_model", lambda: model.model)()  # of an adapter
        names = inspect.signature(inner.forward).parameters
        if "pixel_values" not in names:
            raise UsageError("techniques: progressive_resizing: the model has no input pixel_values: remove it")
        if cfg.task == "segmentation":
            raise UsageError(
                "techniques: progressive_resizing: segmentation would have to scale labels, too: remove it"
            )
        self.resize = Resize(self.multiple, "interpolate_pos_encoding" in names)
        model.model.register_forward_pre_hook(self.resize, with_kwargs=True)

    def around_gradient(self, compute: Compute, batch: StepBatch, totals: StepTotals) -> StepLosses:
        self.resize.scale = self.scale_at((self.run.state.step - 1) / self.run.num_steps)
        try:
            return compute(batch, totals)
        finally:
            self.resize.scale = 1.0

    def scale_at(self, fraction: float) -> float:
        """Return the scale after this share of the steps."""
        growing = 1 - self.delay_fraction - self.finetune_fraction
        if fraction < self.delay_fraction:
            return self.initial_scale
        if fraction >= 1 - self.finetune_fraction or not growing:
            return 1.0
        return self.initial_scale + (1 - self.initial_scale) * (fraction - self.delay_fraction) / growing


class Resize:
    """A hook that scales `pixel_values`; it does not refer to the run, which would keep DDP's wrapper alive."""

    def __init__(self, multiple: int, interpolates: bool):
        self.multiple, self.interpolates, self.scale = multiple, interpolates, 1.0

    def __call__(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if self.scale == 1:
            return args, kwargs
        pixels, multiple = kwargs["pixel_values"], self.multiple
        size = [min(n, max(1, round(n * self.scale / multiple)) * multiple) for n in pixels.shape[-2:]]
        kwargs = kwargs | {"pixel_values": F.interpolate(pixels, size=size, mode="bilinear", align_corners=False)}
        return args, kwargs | ({"interpolate_pos_encoding": True} if self.interpolates else {})
