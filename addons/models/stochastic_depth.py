"""Stochastic depth of a model: the option `stochastic_depth`; LayerDrop is switched off.

After Huang et al. 2016, "Deep Networks with Stochastic Depth". Tests: tests/addons/models/test_stochastic_depth.py.
"""

from typing import TYPE_CHECKING

from src.config.errors import UsageError, warn
from src.config.schema import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BY_ROW = "drop_path_rate"  # field of transformers' configs: a layer is multiplied by zero for some rows
BY_LAYER = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")  # a layer is not computed, for all rows


def set_stochastic_depth(cfg: RunConfig, config: "PreTrainedConfig") -> None:
    """Set `drop_path_rate` of a model's config to `stochastic_depth`, if given; switch LayerDrop off, with a warning.

    LayerDrop skips whole layers, so DDP would find no gradient, and ranks of a sharded model would wait forever. Raise
    UsageError for `stochastic_depth` if the config has no such field."""
    for name in BY_LAYER:
        if value := getattr(config, name, 0.0):
            setattr(config, name, 0.0)
            warn(f"{name} is {value:g} in the model's configuration: set to 0, because every rank must run every layer")
    if cfg.stochastic_depth is None:
        return
    if getattr(config, BY_ROW, None) is None:
        refuse_stochastic_depth(cfg, f"the config of {config.model_type} has no field {BY_ROW}")
    setattr(config, BY_ROW, cfg.stochastic_depth)


def refuse_stochastic_depth(cfg: RunConfig, reason: str) -> None:
    """Raise UsageError if `stochastic_depth` is given, because of `reason`."""
    if cfg.stochastic_depth is not None:
        raise UsageError(
            f"stochastic_depth is {cfg.stochastic_depth}, but {reason}: remove it, or use a model that has it "
            "(convnext, swin, dinov2, beit, segformer, …)"
        )
